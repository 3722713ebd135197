/**
 * Markdown-lite: fenced code, inline code, bold, headings; everything else is the text itself, whitespace kept.
 * Rendering is incremental: a block whose source has not changed keeps its nodes, so that a growing answer costs its last
 * paragraph only and a selection in an earlier one survives.
 */

import { el } from "./dom.js";

const FENCE = /^ {0,3}```([^`]*)$/;
const INLINE = /(`[^`\n]+`)|(\*\*(?=\S)[^\n]*?\S\*\*)/g;
const HEADING = /^(#{1,6}) +(.*)$/;

/** `[{kind: "code" | "text", source, language?}]`. A fence that is still open runs to the end. */
export function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let language = null;
  const flush = () => {
    const source = lines.join("\n");
    if (language !== null) blocks.push({ kind: "code", source, language });
    else if (source.trim()) blocks.push({ kind: "text", source: source.replace(/^\n+|\s+$/g, "") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = FENCE.exec(line);
    if (fence && (language === null || !fence[1].trim())) {
      flush();
      language = language === null ? fence[1].trim() : null;
    } else if (language === null && !line.trim()) {
      flush();
    } else if (language === null && HEADING.test(line)) {
      flush();
      lines = [line];
      flush();
    } else {
      lines.push(line);
    }
  }
  if (lines.length || language !== null) flush();
  return blocks;
}

/** Make `host` show `text`. `rendered` is the block list of the last call on the same host; returns the new one. */
export function renderInto(host, text, rendered = []) {
  const blocks = splitBlocks(text);
  blocks.forEach((block, index) => {
    const before = rendered[index];
    if (before && before.kind === block.kind && before.source === block.source && before.language === block.language) {
      return;
    }
    const node = block.kind === "code" ? codeBlock(block) : textBlock(block);
    if (host.children[index]) host.children[index].replaceWith(node);
    else host.append(node);
  });
  while (host.children.length > blocks.length) host.lastElementChild.remove();
  return blocks;
}

function codeBlock({ source, language }) {
  const code = el("code", { text: source });
  const copy = el("button", { type: "button", class: "quiet small", text: "Copy", "aria-label": "Copy this code" });
  copy.addEventListener("click", () => copyText(source, copy));
  const head = el("div", { class: "code-head" }, el("span", { text: language || "code" }), copy);
  return el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code));
}

function textBlock({ source }) {
  const heading = HEADING.exec(source);
  if (heading) return inline(el("p", { class: "heading" }), heading[2]);
  return inline(el("p"), source);
}

function inline(host, source) {
  let from = 0;
  for (const match of source.matchAll(INLINE)) {
    host.append(source.slice(from, match.index));
    host.append(match[1] ? el("code", { text: match[1].slice(1, -1) }) : el("strong", { text: match[2].slice(2, -2) }));
    from = match.index + match[0].length;
  }
  host.append(source.slice(from));
  return host;
}

/** Copies and says so on the button; without a clipboard (plain http on another host) it says that instead. */
export async function copyText(text, button) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = "No clipboard";
  }
  const label = button.textContent;
  if (button.dataset.busy) return;
  button.dataset.busy = "true";
  button.textContent = said;
  setTimeout(() => {
    button.textContent = label;
    delete button.dataset.busy;
  }, 1200);
}
