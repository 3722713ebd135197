/** The live strip: the batch of the moment, the counters, the time line and the shapes seen. Fed by `steps` events. */

import { byId, el, setText } from "./dom.js";
import { UNKNOWN, duration, integer, percent, rate, shapeName } from "./format.js";
import { Timeline } from "./timeline.js";

const MOST_CELLS = 64;
const SPEED_SECONDS = 2;
const MOST_SHAPES = 7;

function setFigure(id, text) {
  setText(byId(id), text);
  byId(id).classList.toggle("unknown", text === UNKNOWN);
}

/** Tokens per second over the last events: one event may be shorter than a step, and its own rate then jumps. */
class Speed {
  #samples = [];
  #lastAt = 0;

  over({ tokens_per_second: perSecond, running }) {
    const now = performance.now() / 1000;
    const seconds = Math.min(now - this.#lastAt, 1);
    this.#lastAt = now;
    if (!running && !perSecond) this.#samples = [];
    this.#samples.push({ now, seconds, tokens: perSecond * seconds });
    while (this.#samples[0].now < now - SPEED_SECONDS) this.#samples.shift();
    const sum = (name) => this.#samples.reduce((total, sample) => total + sample[name], 0);
    return sum("tokens") / sum("seconds");
  }
}

export class Live {
  #timeline = new Timeline(byId("timeline"));
  #shapes = new Map();
  #speed = new Speed();
  #events = 0;

  constructor() {
    const toggle = byId("live-toggle");
    toggle.addEventListener("click", () => {
      const open = byId("live").dataset.open !== "true";
      byId("live").dataset.open = String(open);
      toggle.setAttribute("aria-expanded", String(open));
      setText(toggle, open ? "Less" : "More");
      this.#timeline.draw();
    });
  }

  /** One `steps` event: `shapes` and `steps` are since the last event, `hits` and `misses` are totals. */
  update(event) {
    const shapes = (event.shapes ?? []).filter((shape) => shape.count > 0);
    this.#events += 1;
    setFigure("tokens-per-second", rate(this.#speed.over(event)));
    setFigure("running", integer(event.running));
    setFigure("waiting", integer(event.waiting));
    const promised = event.hits + event.misses;
    if (promised > 0) setFigure("hit-rate", percent(event.hits / promised));
    byId("hit-rate").classList.toggle("bad", event.misses > 0);
    const busy = shapes.length > 0 || event.running > 0;
    byId("live").dataset.busy = String(busy);
    this.#showBlocks(event.blocks_used, event.blocks_total);
    this.#timeline.add(shapes);
    if (!busy) this.#dim();
    if (!shapes.length) return;
    this.#showNow(shapes);
    for (const shape of shapes) this.#count(shape);
    this.#showShapes();
  }

  /** The connection is gone: what is shown is no longer the present. */
  stale() {
    for (const id of ["tokens-per-second", "running", "waiting"]) setFigure(id, UNKNOWN);
    byId("live").dataset.busy = "false";
    this.#dim();
  }

  #showBlocks(used, total) {
    const known = typeof used === "number" && total > 0;
    setText(byId("kv-text"), known ? `${integer(used)} of ${integer(total)}` : "–");
    byId("kv-fill").style.transform = `scaleX(${known ? used / total : 0})`;
    const bar = byId("kv-bar");
    bar.setAttribute("aria-valuemax", String(known ? total : 1));
    bar.setAttribute("aria-valuenow", String(known ? used : 0));
  }

  /** The shape most steps of the event had; the prompt's own steps only when there were no others. */
  #showNow(shapes) {
    const decoding = shapes.filter((shape) => shape.kind !== "prefill");
    const pick = (list) => list.reduce((best, each) => (each.count > best.count ? each : best));
    const shape = pick(decoding.length ? decoding : shapes);
    setText(byId("shape"), shapeName(shape.rows, shape.width));
    const kind = byId("shape-kind");
    const hit = byId("shape-hit");
    kind.hidden = hit.hidden = false;
    setText(kind, shape.kind);
    kind.dataset.kind = shape.kind;
    setText(hit, shape.hit ? "hit" : shape.kind === "prefill" ? "eager" : "miss");
    hit.dataset.hit = shape.hit ? "true" : shape.kind === "prefill" ? "eager" : "false";
    this.#showCells(shape);
  }

  #showCells({ rows, real_rows: realTotal, count, kind }) {
    const host = byId("cells");
    const perCell = Math.ceil(rows / MOST_CELLS);
    const cells = Math.ceil(rows / perCell);
    const real = realTotal / count;
    while (host.children.length < cells) host.append(el("i"));
    while (host.children.length > cells) host.lastElementChild.remove();
    const solid = Math.ceil(real / perCell);
    for (let index = 0; index < cells; index += 1) {
      const state = index < solid ? (kind === "decode" ? "real" : "prompt") : "pad";
      if (host.children[index].className !== state) host.children[index].className = state;
    }
    const mean = Number.isInteger(real) ? integer(real) : real.toFixed(1);
    host.setAttribute("aria-label", `${mean} real rows and ${rate(rows - real)} pad rows of ${rows}`);
    const unit = perCell > 1 ? `, ${perCell} rows a cell` : "";
    setText(byId("cells-note"), `${mean} real, ${Number.isInteger(real) ? rows - real : (rows - real).toFixed(1)} pad${unit}`);
  }

  #count({ rows, width, kind, hit, count, pad_rows: pad, seconds }) {
    const key = `${kind} ${rows} ${width}`;
    const seen = this.#shapes.get(key) ?? { rows, width, kind, hits: 0, misses: 0, pad: 0, seconds: 0, at: 0 };
    seen[hit ? "hits" : "misses"] += count;
    seen.pad += pad;
    seen.seconds += seconds;
    seen.at = this.#events;
    this.#shapes.set(key, seen);
  }

  #showShapes() {
    const recent = [...this.#shapes.values()].sort((a, b) => b.at - a.at).slice(0, MOST_SHAPES);
    // A stable order, or rows would trade places ten times a second.
    recent.sort((a, b) => a.kind.localeCompare(b.kind) || b.rows - a.rows || (b.width ?? 0) - (a.width ?? 0));
    byId("shapes").replaceChildren(...recent.map((shape) => this.#shapeRow(shape)));
  }

  #shapeRow({ rows, width, kind, hits, misses, pad, seconds, at }) {
    const count = hits + misses;
    const cell = (text, name) => el("td", { text, class: name });
    return el("tr", { class: at === this.#events ? "active" : null },
      el("th", { scope: "row", text: shapeName(rows, width) }),
      cell(kind, `kind ${kind}`),
      cell(integer(hits), hits ? "hits" : "none"),
      // A prompt's eager steps were promised no graph, so they are no misses.
      cell(kind === "prefill" && misses ? `${integer(misses)} eager` : integer(misses),
        misses && kind !== "prefill" ? "misses" : "none"),
      cell((pad / count).toFixed(1)),
      cell(duration(seconds / count)));
  }

  #dim() {
    for (const row of byId("shapes").children) row.classList.remove("active");
  }
}
