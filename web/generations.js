/**
 * The generations in flight on the socket: gives each an id and routes what comes back to whoever asked.
 * Every generation ends exactly once: by `done`, by an `error` that bears its id, or because the connection is gone.
 */

export class Generations {
  #send;
  #live = new Map();
  #count = 0;
  #prefix = Math.random().toString(36).slice(2, 8);

  /** `send(message)` returns false when it could not be sent. */
  constructor(send) {
    this.#send = send;
  }

  /** `sink`: started(message), token(message), done(message), failed(error). Returns the id to cancel it by. */
  start(request, sink) {
    const id = `${this.#prefix}-${(this.#count += 1)}`;
    this.#live.set(id, sink);
    if (!this.#send({ type: "generate", id, ...request })) {
      this.#end(id)?.failed({ message: "not sent: there is no connection to the server" });
    }
    return id;
  }

  cancel(id) {
    if (this.#live.has(id)) this.#send({ type: "cancel", id });
  }

  /** True if the message belonged to a generation. Unknown types and ids of ended generations are ignored. */
  dispatch(message) {
    switch (message.type) {
      case "start":
        this.#live.get(message.id)?.started(message);
        return true;
      case "token":
        this.#live.get(message.id)?.token(message);
        return true;
      case "done":
        this.#end(message.id)?.done(message);
        return true;
      case "error":
        if (message.id === undefined || message.id === null) return false;
        this.#end(message.id)?.failed(message.error);
        return true;
      default:
        return false;
    }
  }

  /** The connection is gone, and with it every generation on it: the server cancels them. */
  lose() {
    for (const id of [...this.#live.keys()]) {
      this.#end(id).failed({ message: "the connection was lost; what had arrived is shown", code: "connection_lost" });
    }
  }

  #end(id) {
    const sink = this.#live.get(id);
    this.#live.delete(id);
    return sink;
  }
}
