/** The page's composition root: makes the parts, joins them, and owns the composer. */

import { Chat } from "./chat.js";
import { byId, el, setText } from "./dom.js";
import { integer } from "./format.js";
import { Generations } from "./generations.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { Socket } from "./socket.js";
import { Status } from "./status.js";

const EXAMPLES = [
  "What is the capital of France?",
  "Write a Python function that reverses a list.",
  "Tell me a long story about a lighthouse keeper.",
];
const TALLEST_PROMPT_PIXELS = 200;

const prompt = byId("prompt");
const live = new Live();
const generations = new Generations((message) => socket.send(message));
const status = new Status({
  onKey: (key) => socket.useKey(key),
  onRetry: () => socket.retryNow(),
  onChange: () => refresh(),
});
const chat = new Chat({ log: byId("log"), intro: byId("intro"), generations, onChange: () => refresh() });
const settings = new Settings({
  panel: byId("settings"),
  toggle: byId("settings-toggle"),
  reset: byId("settings-reset"),
  onChange: () => refresh(),
});
const socket = new Socket({ onState, onMessage });

function onState(link) {
  status.setLink(link);
  if (link.state === "open") socket.send({ type: "subscribe", channel: "live" });
  else if (link.state !== "connecting") {
    generations.lose();
    live.stale();
  }
}

function onMessage(message) {
  if (message.type === "live") onEvent(message.event);
  else if (!generations.dispatch(message) && message.type === "error") {
    status.setError(message.error?.message ?? "The server reported an error.");
  }
}

function onEvent(event) {
  if (event.type === "boot") {
    status.setBoot(event);
    if (event.stage === "ready" || event.stage === "degraded") nameModel();
  } else if (event.type === "steps") {
    if (!status.sawBoot) status.setBoot({ stage: "ready" });
    live.update(event);
  }
}

async function nameModel() {
  try {
    const { data } = await (await socket.fetch("v1/models")).json();
    const [model] = data;
    setText(byId("model"), model.id);
    if (model.max_model_len) byId("model").title = `context ${integer(model.max_model_len)} tokens`;
  } catch {
    // The name is an ornament; the chat works without it.
  }
}

function refresh() {
  const { running } = chat;
  const { reason } = status;
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  byId("send").disabled = byId("parallel").disabled = Boolean(reason);
  byId("parallel").hidden = running;
  setText(byId("parallel"), `Ask × ${settings.parallel}`);
  const keys = running ? "Esc stops" : "Enter sends, Shift+Enter breaks the line";
  setText(byId("hint"), reason || keys);
  byId("hint").classList.toggle("blocked", Boolean(reason));
}

function ask(count) {
  const question = prompt.value.trim();
  if (!question || status.reason || chat.running) return;
  const seeds = count > 1 ? settings.seeds(count) : [null];
  chat.ask(question, { system: settings.system, fields: settings.fields, seeds });
  prompt.value = "";
  fitPrompt();
  prompt.focus();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, TALLEST_PROMPT_PIXELS)}px`;
}

function stop() {
  chat.stop();
  prompt.focus();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(1);
});
byId("parallel").addEventListener("click", () => ask(settings.parallel));
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  prompt.focus();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  // While an input method composes, Enter picks a candidate and is not ours.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(1);
});
byId("settings").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.target.localName !== "input") return;
  event.preventDefault();
  prompt.focus();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.running) stop();
});
byId("examples").append(...EXAMPLES.map((text) => {
  const button = el("button", { type: "button", class: "example", text });
  button.addEventListener("click", () => {
    prompt.value = text;
    fitPrompt();
    prompt.focus();
    ask(1);
  });
  return el("li", {}, button);
}));

refresh();
socket.connect();
