/** One answer on the page: its growing text, its footer, its error. A sink of `Generations`. */

import { el, setText } from "./dom.js";
import { duration, integer, plural, rate } from "./format.js";
import { copyText, renderInto } from "./markup.js";

const NEAR_END_PIXELS = 40;
const REASONS = {
  stop: ["complete", "The model ended its answer."],
  length: ["token limit", "The answer reached max tokens or the end of the context."],
  cancelled: ["cancelled", "Stopped before it was complete."],
  timeout: ["timed out", "The request's time limit passed."],
  draining: ["server draining", "The server is shutting down."],
  error: ["failed", "The engine failed while answering."],
};

export class Answer {
  /** "waiting", "streaming", "done" or "failed". */
  state = "waiting";
  text = "";

  #body = el("div", { class: "answer-text" });
  #footer = el("p", { class: "answer-footer" });
  #error = el("p", { class: "answer-error", role: "alert", hidden: true });
  #rendered = [];
  #frame = 0;
  #tokens = 0;
  #askedAt = performance.now();
  #firstAt = 0;
  #onChange;
  #label;

  /** `onChange(answer)` is called after each repaint and on each end; `label` names the answer among parallel ones. */
  constructor({ onChange, label = "" }) {
    this.#onChange = onChange;
    this.#label = label;
    this.node = el("article", { class: "answer", "aria-label": label ? `Answer, ${label}` : "Answer" });
    this.node.append(this.#body, this.#error, this.#footer);
    this.#setState("waiting");
    this.#showFooter(["sent"]);
  }

  get running() {
    return this.state === "waiting" || this.state === "streaming";
  }

  started(message) {
    this.#showFooter([plural(message.prompt_tokens, "prompt token")]);
  }

  token(message) {
    if (this.state === "waiting") {
      this.#firstAt = performance.now();
      this.#setState("streaming");
    }
    this.text += message.text;
    this.#tokens += message.tokens ?? 1;
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  done(message) {
    this.#paint();
    this.#setState("done");
    this.#showAccount(message);
    this.#onChange(this);
  }

  failed(error) {
    this.#paint();
    this.#setState("failed");
    setText(this.#error, error?.message ?? "the server gave no reason");
    this.#error.hidden = false;
    this.#showFooter([{ text: "failed", reason: "error" }, error?.code ?? error?.type].filter(Boolean));
    this.#onChange(this);
  }

  #setState(state) {
    this.state = state;
    this.node.dataset.state = state;
    // A reader announces the answer once, when it is whole, instead of every token.
    this.#body.setAttribute("aria-busy", String(this.running));
  }

  #paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { scrollHeight, scrollTop, clientHeight } = this.#body;
    const following = scrollHeight - scrollTop - clientHeight < NEAR_END_PIXELS;
    this.#rendered = renderInto(this.#body, this.text, this.#rendered);
    if (following) this.#body.scrollTop = this.#body.scrollHeight;
    const seconds = (performance.now() - this.#firstAt) / 1000;
    const parts = [plural(this.#tokens, "token")];
    if (this.#tokens > 1 && seconds > 0.2) parts.push(`${rate((this.#tokens - 1) / seconds)} tok/s`);
    if (this.#firstAt) parts.push(`first token ${duration((this.#firstAt - this.#askedAt) / 1000)}`);
    this.#showFooter(parts);
    this.#onChange(this);
  }

  /** `items`: what the footer says, each a text or `{text, title, reason}`. */
  #showFooter(items) {
    const all = this.#label ? [this.#label, ...items] : items;
    this.#footer.replaceChildren(...all.map((item) => {
      const { text, title, reason } = typeof item === "string" ? { text: item } : item;
      return el("span", { text, title, "data-reason": reason });
    }));
  }

  /** The server's own account of the generation replaces what the page measured while it ran. */
  #showAccount({ finish_reason: reason, usage = {}, nanoserve = {} }) {
    const { graph = {}, timings = {} } = nanoserve;
    const [word, meaning] = REASONS[reason] ?? [reason ?? "ended", null];
    const produced = usage.completion_tokens ?? this.#tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const items = [
      { text: word, title: meaning, reason },
      {
        text: plural(produced, "token"),
        title: `after a prompt of ${integer(usage.prompt_tokens)}, ${integer(cached)} of them from the prefix cache`,
      },
    ];
    if (timings.decode_seconds > 0 && produced > 1) {
      const speed = rate((produced - 1) / timings.decode_seconds);
      items.push({ text: `${speed} tok/s`, title: "tokens after the first ÷ decode time" });
    }
    if (typeof timings.ttft_seconds === "number") {
      const title = `queued ${duration(timings.queue_seconds)}, prefill ${duration(timings.prefill_seconds)}`;
      items.push({ text: `first token ${duration(timings.ttft_seconds)}`, title });
    }
    if (graph.steps > 0) {
      const title = `${plural(graph.replays, "step")} replayed a graph, ${integer(graph.eager_steps)} ran without one`;
      items.push({ text: `graphs ${integer(graph.replays)}/${integer(graph.steps)}`, title });
      items.push({ text: `pad ${rate(graph.mean_pad_rows)}`, title: "mean pad rows per step" });
    }
    this.#showFooter(items);
    if (!this.text) return;
    const copy = el("button", { type: "button", class: "quiet small", text: "Copy", "aria-label": "Copy this answer" });
    copy.addEventListener("click", () => copyText(this.text, copy));
    this.#footer.append(copy);
  }
}
