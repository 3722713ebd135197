/**
 * The page's one connection: open it, keep it, and say in which state it is. Knows the key and the back-off, not what
 * the messages mean.
 *
 * States handed to `onState`: {state: "connecting"} · {state: "open"} · {state: "waiting", seconds, reason} ·
 * {state: "refused", hadKey} (a key is needed: nothing is tried until `useKey`).
 */

const PROTOCOL = "nanoserve.v1";
const KEY_PREFIX = "nanoserve.key.";
const KEY_ITEM = "nanoserve.key";
const FIRST_WAIT_SECONDS = 0.5;
const PROBE_MILLISECONDS = 5000;
const LONGEST_WAIT_SECONDS = 10;

/** Unpadded base64url of the UTF-8 bytes: the alphabet a subprotocol name may use. */
export function encodeKey(key) {
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  return btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export class Socket {
  #handlers;
  #socket = null;
  #timer = 0;
  #failures = 0;

  /** `handlers`: onState(state), onMessage(object). */
  constructor(handlers) {
    this.#handlers = handlers;
    addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.retryNow());
  }

  get key() {
    return sessionStorage.getItem(KEY_ITEM);
  }

  useKey(key) {
    sessionStorage.setItem(KEY_ITEM, key);
    this.#failures = 0;
    this.connect();
  }

  /** Sends one message; false if there is no open connection to send it on. */
  send(message) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  /** Cuts a running wait short. Does nothing in any other state. */
  retryNow() {
    if (this.#timer) this.connect();
  }

  connect() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const key = this.key;
    const url = new URL("ws", document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const socket = new WebSocket(url, key ? [PROTOCOL, KEY_PREFIX + encodeKey(key)] : [PROTOCOL]);
    let opened = false;
    this.#socket = socket;
    this.#handlers.onState({ state: "connecting" });
    socket.onopen = () => {
      opened = true;
      this.#handlers.onState({ state: "open" });
    };
    socket.onmessage = (event) => {
      this.#failures = 0;
      this.#handlers.onMessage(JSON.parse(event.data));
    };
    socket.onclose = () => {
      if (this.#socket === socket) this.#closed(opened);
    };
  }

  /** A browser hides why a handshake failed, so an unopened socket is explained by one plain request. */
  async #closed(opened) {
    this.#socket = null;
    if (opened) return this.#wait("the connection was closed");
    const answer = await this.#probe();
    if (this.#socket) return;
    if (answer === 401) this.#handlers.onState({ state: "refused", hadKey: Boolean(this.key) });
    else if (answer === null) this.#wait("the server does not answer");
    else this.#wait("the server refused this page's socket; open the page at the server's own address");
  }

  /** HTTP status of a route that asks for the key, null if there is no server. */
  async #probe() {
    try {
      return (await this.fetch("v1/models", { signal: AbortSignal.timeout(PROBE_MILLISECONDS) })).status;
    } catch {
      return null;
    }
  }

  /** A plain request with the key, for the little that is asked outside the socket. */
  fetch(path, options = {}) {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    return fetch(path, { cache: "no-store", headers, ...options });
  }

  #wait(reason) {
    const ceiling = Math.min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** this.#failures);
    const seconds = ceiling * (0.75 + Math.random() / 4);
    this.#failures += 1;
    this.#timer = setTimeout(() => this.connect(), seconds * 1000);
    this.#handlers.onState({ state: "waiting", seconds, reason });
  }
}
