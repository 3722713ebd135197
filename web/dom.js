/** Building and finding elements. Text enters the page as text nodes only, so what a model writes stays inert. */

/** `el("p", {class: "note", text: "…", onclick: f}, …children)`; null, undefined and false properties are left out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`the page has no element #${id}`);
  return node;
}

/** Set text only when it differs: an unchanged live region is not announced again, and nothing is laid out. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
