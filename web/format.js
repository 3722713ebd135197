/** Numbers as people read them. Unknown (null or undefined) is always an en dash, never a zero. */

export const UNKNOWN = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export function integer(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : UNKNOWN;
}

/** Three significant places at most: 7.25, 61.2, 1,228. */
export function rate(value) {
  if (!known(value)) return UNKNOWN;
  if (value >= 100 || value === 0) return integer(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** Never rounds a miss away: 0.99999 is 99.99 %, and only exactly 1 is 100 %. */
export function percent(ratio) {
  if (!known(ratio)) return UNKNOWN;
  if (ratio === 1 || ratio === 0) return `${ratio * 100} %`;
  return `${(Math.floor(ratio * 10000) / 100).toFixed(ratio > 0.99 ? 2 : 1)} %`;
}

export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 0.0095) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 119.5) return `${Math.round(seconds)} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** `4 × 256` for a rectangle, `4 rows` for a read whose key has no width. */
export function shapeName(rows, width) {
  if (known(width)) return `${rows} × ${width}`;
  return rows === 1 ? "1 row" : `${integer(rows)} rows`;
}

export function plural(count, noun) {
  return `${integer(count)} ${noun}${count === 1 ? "" : "s"}`;
}
