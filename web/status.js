/**
 * What stands between the reader and an answer: the connection, the boot, a missing key. Shows it in the header's pill and
 * the banner, and derives the one sentence that says why sending is not possible.
 */

import { byId, setText } from "./dom.js";
import { duration, integer } from "./format.js";

const MOST_COUNTED = 10000;
const READY = new Set(["ready", "degraded"]);
const STAGES = {
  starting: "Starting",
  loading: "Loading the model",
  warming: "Recording graphs",
};

const stageName = (stage) => {
  const words = STAGES[stage] ?? String(stage).replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
};

/** Graphs are counted, bytes are not worth their digits. */
const amount = (done, total) =>
  total > MOST_COUNTED ? `${Math.floor((100 * done) / total)} %` : `${integer(done)} of ${integer(total)}`;

export class Status {
  #onChange;
  #onButton = () => {};
  #link = { state: "connecting" };
  #boot = null;
  #error = "";
  #failure = "";
  #retryAt = 0;
  #ticker = 0;

  /** `onKey(key)`, `onRetry()`, `onChange()`: called after every change of what `reason` says. */
  constructor({ onKey, onRetry, onChange }) {
    this.#onChange = onChange;
    this.onRetry = onRetry;
    byId("notice-button").addEventListener("click", () => this.#onButton());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const field = byId("key");
      const key = field.value.trim();
      if (key) onKey(key);
    });
  }

  /** Why nothing can be sent now, or "" if it can. */
  get reason() {
    if (this.#link.state === "refused") return "The server wants an API key.";
    if (this.#link.state !== "open") return "Not connected to the server.";
    if (!this.#boot) return "Waiting for the engine’s state.";
    if (READY.has(this.#boot.stage)) return "";
    if (this.#boot.stage === "failed") return "The engine failed; restart the server.";
    if (this.#boot.stage === "draining") return "The server is shutting down.";
    return `Sending opens when the engine is ready: ${stageName(this.#boot.stage).toLowerCase()}.`;
  }

  setLink(link) {
    const before = this.#link.state;
    this.#link = link;
    if (link.state !== "open") this.#boot = null;
    if (link.state === "waiting") this.#retryAt = performance.now() + link.seconds * 1000;
    clearInterval(this.#ticker);
    if (link.state === "waiting") this.#ticker = setInterval(() => this.#showNotice(), 250);
    if (link.state === "refused") {
      const note = link.hadKey ? "The server refused that key." : "This server asks for a key. It stays in this tab.";
      setText(byId("key-note"), note);
    }
    this.#show();
    if (link.state === "refused") byId("key").focus();
    if (link.state === "open" && before === "refused") byId("key").value = "";
  }

  /** A `boot` event. A `steps` event without one before it means that the engine is up. */
  setBoot(event) {
    this.#boot = event;
    this.#failure = event.stage === "failed" ? `The engine failed: ${event.message ?? "see the server's log"}` : "";
    this.#show();
  }

  get sawBoot() {
    return this.#boot !== null;
  }

  /** An error that belongs to no generation; stays until dismissed. */
  setError(message) {
    this.#error = message;
    this.#show();
  }

  #show() {
    this.#showPill();
    this.#showBoot();
    this.#showNotice();
    byId("key-form").hidden = this.#link.state !== "refused";
    byId("banner").hidden = byId("boot").hidden && byId("notice").hidden && byId("key-form").hidden;
    this.#onChange();
  }

  #showPill() {
    const { state } = this.#link;
    let [shown, text] = [state, { connecting: "connecting", waiting: "reconnecting", refused: "key needed" }[state]];
    if (state === "open") {
      const stage = this.#boot?.stage;
      shown = !stage ? "connecting" : READY.has(stage) ? "ready" : stage === "failed" ? "failed" : "booting";
      text = stage ?? "connected";
    }
    byId("link").dataset.state = shown;
    setText(byId("link-text"), text);
  }

  #showBoot() {
    const boot = this.#boot;
    const booting = boot && !READY.has(boot.stage) && boot.stage !== "failed" && boot.stage !== "draining";
    byId("boot").hidden = !booting;
    if (!booting) return;
    const counted = boot.total > 0 && boot.done !== null;
    setText(byId("boot-stage"), stageName(boot.stage));
    setText(byId("boot-count"), counted ? amount(boot.done, boot.total) : "");
    const eta = typeof boot.eta_seconds === "number" ? `about ${duration(boot.eta_seconds)} left` : "";
    setText(byId("boot-eta"), eta);
    const bar = byId("boot-bar");
    if (counted) {
      bar.max = boot.total;
      bar.value = boot.done;
    } else {
      bar.removeAttribute("value");
    }
  }

  #showNotice() {
    let [text, label] = ["", ""];
    this.#onButton = () => {};
    if (this.#link.state === "waiting") {
      const left = Math.max(0, Math.ceil((this.#retryAt - performance.now()) / 1000));
      // A boot that fails ends the process, so its last word outlives the connection it came on.
      text = `${this.#failure && `${this.#failure}. `}No connection: ${this.#link.reason}. Next try in ${left} s.`;
      label = "Try now";
      this.#onButton = this.onRetry;
    } else if (this.#failure) {
      text = `${this.#failure}.`;
    } else if (this.#boot?.stage === "draining") {
      text = "The server is shutting down; what runs is being finished.";
    } else if (this.#boot?.stage === "degraded") {
      text = "Ready, but not every shape was recorded: see /health for which.";
    } else if (this.#error) {
      text = this.#error;
      label = "Dismiss";
      this.#onButton = () => this.setError("");
    }
    byId("notice").hidden = !text;
    setText(byId("notice-text"), text);
    byId("notice-button").hidden = !label;
    if (label) setText(byId("notice-button"), label);
  }
}
