/**
 * The rolling picture of recent steps: rows over time, real rows solid and pad rows pale, misses marked on the base line.
 * The vertical scale is log₂ because the buckets are. It is drawn when an event comes, at most ten times a second, and
 * not per frame: the machine that would animate it is the machine that computes the answer.
 */

const SPAN_SECONDS = 30;
const LANE_PIXELS = 4;
const LABEL_PIXELS = 26;
const JOIN_SECONDS = 0.25;
const SHORTEST_SECONDS = 0.1;
const SMALLEST_TOP = 4;

export class Timeline {
  #canvas;
  #columns = [];

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Add what happened since the last event: `shapes` as they come in a `steps` event. */
  add(shapes) {
    const now = performance.now() / 1000;
    if (shapes.length) {
      // A column is as long as its steps took, and reaches the one before it if nearly nothing lies between them.
      const busy = Math.max(SHORTEST_SECONDS, shapes.reduce((sum, shape) => sum + (shape.seconds ?? 0), 0));
      const before = this.#columns.at(-1)?.to ?? -Infinity;
      const from = now - before <= busy + JOIN_SECONDS ? before : now - busy;
      this.#columns.push({ from, to: now, ...tallest(shapes) });
    }
    while (this.#columns.length && this.#columns[0].to < now - SPAN_SECONDS) this.#columns.shift();
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (!width || !height) return;
    const scale = devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * scale)) this.#canvas.width = Math.round(width * scale);
    if (this.#canvas.height !== Math.round(height * scale)) this.#canvas.height = Math.round(height * scale);
    const paint = this.#canvas.getContext("2d");
    const style = getComputedStyle(this.#canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    const base = height - LANE_PIXELS - 3;
    const top = Math.max(SMALLEST_TOP, ...this.#columns.map((column) => column.rows));
    const level = (rows) => (Math.log2(1 + rows) / Math.log2(1 + top)) * (base - 8);
    this.#drawGrid(paint, { width, base, top, level, color, font: style.fontFamily });
    this.#drawColumns(paint, { width, base, height, scale, level, color });
  }

  #drawGrid(paint, { width, base, top, level, color, font }) {
    paint.font = `10px ${font}`;
    paint.textAlign = "right";
    paint.textBaseline = "middle";
    const step = top > 64 ? 8 : top > 8 ? 4 : 2;
    for (let rows = 1; rows <= top; rows *= step) {
      const y = Math.round(base - level(rows)) + 0.5;
      paint.fillStyle = color("--line");
      paint.fillRect(LABEL_PIXELS, y, width - LABEL_PIXELS, 1);
      paint.fillStyle = color("--muted");
      paint.fillText(String(rows), LABEL_PIXELS - 6, y);
    }
    paint.fillStyle = color("--line");
    paint.fillRect(LABEL_PIXELS, base + 0.5, width - LABEL_PIXELS, 1);
  }

  #drawColumns(paint, { width, base, height, scale, level, color }) {
    const now = performance.now() / 1000;
    const perSecond = (width - LABEL_PIXELS) / SPAN_SECONDS;
    // On whole device pixels, or adjoining columns show a seam.
    const snap = (pixels) => Math.round(pixels * scale) / scale;
    const x = (seconds) => Math.max(LABEL_PIXELS, snap(width - (now - seconds) * perSecond));
    for (const { from, to, rows, real, prompt, misses } of this.#columns) {
      const [left, right] = [x(from), x(to)];
      if (right <= LABEL_PIXELS) continue;
      const wide = Math.max(1, right - left);
      paint.fillStyle = color("--pad");
      paint.fillRect(left, base - level(rows), wide, level(rows) - level(real));
      paint.fillStyle = color(prompt ? "--prompt" : "--real");
      paint.fillRect(left, base - level(real), wide, level(real));
      if (misses) {
        paint.fillStyle = color("--miss");
        paint.fillRect(left, height - LANE_PIXELS, Math.max(2, wide), LANE_PIXELS);
      }
    }
  }
}

/** One column for an event: the shape with the most rows, its mean real rows, and whether anything missed. */
function tallest(shapes) {
  const shape = shapes.reduce((best, each) => (each.rows > best.rows ? each : best));
  const misses = shapes.some((each) => !each.hit && each.kind !== "prefill");
  return { rows: shape.rows, real: shape.real_rows / shape.count, prompt: shape.kind !== "decode", misses };
}
