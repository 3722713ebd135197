/** The settings drawer: what is typed there, as request fields. An empty field is absent, so the server's default holds. */

const ITEM = "nanoserve.settings";
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const DEFAULT_PARALLEL = 4;
const RANDOM_SEEDS = 10000;

export class Settings {
  #panel;
  #onChange;

  constructor({ panel, toggle, reset, onChange }) {
    this.#panel = panel;
    this.#onChange = onChange;
    this.#restore();
    panel.addEventListener("input", () => this.#changed());
    toggle.addEventListener("click", () => {
      panel.hidden = !panel.hidden;
      toggle.setAttribute("aria-expanded", String(!panel.hidden));
      if (!panel.hidden) this.#field("system").focus();
    });
    reset.addEventListener("click", () => {
      for (const field of panel.elements) if (field.name) field.value = "";
      this.#changed();
    });
  }

  get system() {
    return this.#field("system").value.trim();
  }

  get parallel() {
    const asked = Number.parseInt(this.#field("parallel").value, 10);
    return Number.isFinite(asked) ? Math.min(32, Math.max(2, asked)) : DEFAULT_PARALLEL;
  }

  /** Request fields. The server checks the ranges; its message is shown where the answer would be. */
  get fields() {
    const fields = {};
    for (const name of NUMBERS) {
      const value = this.#field(name).value;
      if (value !== "") fields[name] = Number(value);
    }
    return fields;
  }

  /** A seed for each of `count` answers: consecutive from the one typed in, else from a random one. */
  seeds(count) {
    const first = this.fields.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] % RANDOM_SEEDS;
    return Array.from({ length: count }, (_, index) => first + index);
  }

  #field(name) {
    return this.#panel.elements.namedItem(name);
  }

  #changed() {
    const values = {};
    for (const field of this.#panel.elements) if (field.name && field.value) values[field.name] = field.value;
    try {
      localStorage.setItem(ITEM, JSON.stringify(values));
    } catch {
      // Storage may be denied; the settings then last as long as the page.
    }
    this.#onChange();
  }

  #restore() {
    try {
      const values = JSON.parse(localStorage.getItem(ITEM) ?? "{}");
      for (const field of this.#panel.elements) if (field.name in values) field.value = values[field.name];
    } catch {
      // Unreadable settings are as good as none.
    }
  }
}
