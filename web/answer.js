/** One answer on the page: its growing text, its footer, its error. A sink of `Generations`. */

import { el, setText } from "./dom.js";
import { duration, integer, plural, rate } from "./format.js";
import { copyText, renderInto } from "./markup.js";

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
    setText(this.#footer, this.#withLabel(["sent"]));
  }

  get running() {
    return this.state === "waiting" || this.state === "streaming";
  }

  started(message) {
    setText(this.#footer, this.#withLabel([plural(message.prompt_tokens, "prompt token")]));
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
    this.#fillFooter(message);
    this.#onChange(this);
  }

  failed(error) {
    this.#paint();
    this.#setState("failed");
    setText(this.#error, error?.message ?? "the server gave no reason");
    this.#error.hidden = false;
    setText(this.#footer, this.#withLabel(["failed", error?.code ?? error?.type].filter(Boolean)));
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
    this.#rendered = renderInto(this.#body, this.text, this.#rendered);
    const seconds = (performance.now() - this.#firstAt) / 1000;
    const parts = [plural(this.#tokens, "token")];
    if (this.#tokens > 1 && seconds > 0.2) parts.push(`${rate((this.#tokens - 1) / seconds)} tok/s`);
    if (this.#firstAt) parts.push(`first token ${duration((this.#firstAt - this.#askedAt) / 1000)}`);
    setText(this.#footer, this.#withLabel(parts));
    this.#onChange(this);
  }

  #withLabel(parts) {
    return (this.#label ? [this.#label, ...parts] : parts).join(" · ");
  }

  /** The server's own account of the generation replaces what the page measured while it ran. */
  #fillFooter({ finish_reason: reason, usage = {}, nanoserve = {} }) {
    const { graph = {}, timings = {} } = nanoserve;
    const [word, meaning] = REASONS[reason] ?? [reason ?? "ended", ""];
    const produced = usage.completion_tokens ?? this.#tokens;
    const items = [[word, meaning]];
    if (this.#label) items.unshift([this.#label, ""]);
    items.push([plural(produced, "token"), `${integer(usage.prompt_tokens)} prompt tokens before them`]);
    if (timings.decode_seconds > 0 && produced > 1) {
      items.push([`${rate((produced - 1) / timings.decode_seconds)} tok/s`, "Tokens after the first ÷ decode time"]);
    }
    if (typeof timings.ttft_seconds === "number") {
      items.push([`first token ${duration(timings.ttft_seconds)}`, `queued ${duration(timings.queue_seconds)}, ` +
        `prefill ${duration(timings.prefill_seconds)}`]);
    }
    if (graph.steps > 0) {
      items.push([`graph ${integer(graph.replays)}/${integer(graph.steps)}`,
        `${plural(graph.replays, "step")} replayed a recorded graph, ${integer(graph.eager_steps)} ran eagerly`]);
      items.push([`${rate(graph.mean_pad_rows)} pad`, "Mean pad rows per step"]);
    }
    const copy = el("button", { type: "button", class: "quiet small", text: "Copy", "aria-label": "Copy this answer" });
    copy.addEventListener("click", () => copyText(this.text, copy));
    this.#footer.replaceChildren(...items.flatMap(([text, title], index) => {
      const span = el("span", { text, title: title || null, class: index === 0 ? `reason ${reason}` : null });
      return index ? [" · ", span] : [span];
    }));
    if (this.text) this.#footer.append(copy);
  }
}
