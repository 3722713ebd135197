/**
 * The conversation: turns of one question and one or more answers, and what of it goes into the next request.
 * Of several parallel answers one is kept for the conversation: the first, until another is chosen.
 */

import { Answer } from "./answer.js";
import { el } from "./dom.js";

const NEAR_END_PIXELS = 60;

export class Chat {
  #log;
  #intro;
  #generations;
  #onChange;
  #turns = [];
  #following = true;

  /** `onChange()` is called whenever `running` may have changed. */
  constructor({ log, intro, generations, onChange }) {
    this.#log = log;
    this.#intro = intro;
    this.#generations = generations;
    this.#onChange = onChange;
    log.addEventListener("scroll", () => {
      this.#following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PIXELS;
    }, { passive: true });
    new ResizeObserver(() => this.#follow()).observe(log);
  }

  get running() {
    return this.#turns.some((turn) => turn.answers.some((answer) => answer.running));
  }

  /** Ask once per entry of `seeds` (null: the server draws one). `fields` are the request's sampling fields. */
  ask(question, { system, fields, seeds }) {
    const messages = this.#messages(system);
    messages.push({ role: "user", content: question });
    const turn = { question, answers: [], ids: [], kept: 0 };
    const host = el("div", { class: seeds.length > 1 ? "answers several" : "answers" });
    const node = el("section", { class: "turn", "aria-label": "Question and answer" },
      el("p", { class: "question", text: question }), host);
    this.#turns.push(turn);
    this.#intro.hidden = true;
    this.#log.append(node);
    this.#following = true;
    for (const seed of seeds) {
      const label = seeds.length > 1 ? `seed ${seed}` : "";
      const answer = new Answer({ label, onChange: () => this.#changed() });
      turn.answers.push(answer);
      host.append(answer.node);
    }
    if (seeds.length > 1) this.#addChoices(turn);
    // Started after all nodes exist: an answer may fail at once, and its turn must be whole by then.
    turn.ids = seeds.map((seed, index) =>
      this.#generations.start({ messages, ...fields, ...(seed === null ? {} : { seed }) }, turn.answers[index]));
    this.#changed();
  }

  /** Cancel whatever runs; the server answers each with a `done` that says cancelled. */
  stop() {
    for (const turn of this.#turns) {
      turn.answers.forEach((answer, index) => answer.running && this.#generations.cancel(turn.ids[index]));
    }
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.#log.replaceChildren(this.#intro);
    this.#intro.hidden = false;
    this.#onChange();
  }

  /** What was said so far. A turn without a word of an answer is left out: templates want roles to alternate. */
  #messages(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { question, answers, kept } of this.#turns) {
      if (!answers[kept].text) continue;
      messages.push({ role: "user", content: question }, { role: "assistant", content: answers[kept].text });
    }
    return messages;
  }

  #addChoices(turn) {
    const buttons = turn.answers.map((answer, index) => {
      const button = el("button", { type: "button", class: "quiet small keep", text: "Continue from this" });
      button.addEventListener("click", () => {
        turn.kept = index;
        mark();
      });
      answer.node.append(button);
      return button;
    });
    const mark = () => buttons.forEach((button, index) => {
      button.setAttribute("aria-pressed", String(index === turn.kept));
      turn.answers[index].node.classList.toggle("kept", index === turn.kept);
    });
    mark();
  }

  #follow() {
    if (this.#following && this.#turns.length) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #changed() {
    this.#follow();
    this.#onChange();
  }
}
