// The page: one stream of pictures, told to each part.

import { Stream, get, hasKey, keepKey, needsKey } from "./api.js";
import { Charts } from "./charts.js";
import { $ } from "./dom.js";
import { listen as listenExplain } from "./explain.js";
import { PoolMap } from "./pool.js";
import { Requests } from "./requests.js";
import { PrefixTree } from "./tree.js";

const HIDDEN_MS = 20000; // a page that nobody sees stops asking
const WORDS = { live: "Live", waiting: "Connecting", paused: "Paused" };

const asked = (path) => get(path).catch((error) => {
  if (needsKey(error)) askForKey(error);
  throw error;
});
const pool = new PoolMap((block) => asked(`admin/view/blocks/${block}`));
const tree = new PrefixTree((branch) => asked(`admin/view/branches/${branch}`));
const requests = new Requests();
const charts = new Charts();
const stream = new Stream("ui/stream", { onEvent, onState, onKeyNeeded: askForKey });
let frame = 0;
let off = null; // what the banner says when nothing is wrong

function onEvent(event) {
  if (event.about !== undefined) about(event.about);
  else if (event.gone !== undefined) banner(`The engine is gone: ${event.gone}. What you see is its last state.`);
  else if (event.frame !== undefined) picture(event);
  if (event.gone === undefined) onState("live");
}

function about(told) {
  frame = 0;
  $("model").textContent = `${told.model} · ${told.dtype}, up to ${told.max_model_len.toLocaleString("en")} tokens`;
  document.title = `Headwater: ${told.model}`;
  pool.about(told);
  off = told.enable_prefix_caching ? null : "Prefix caching is off (--no-enable-prefix-caching): nothing is kept for reuse.";
}

function picture(event) {
  const whole = event.base === undefined;
  if (!whole && event.base !== frame) {
    stream.restart(); // a picture was missed
    return;
  }
  frame = event.frame;
  if (whole) {
    requests.restart();
    banner(off);
  }
  pool.take(event);
  if (event.tree !== undefined) tree.take(event.tree);
  requests.take(event.requests);
  charts.take(event.samples, event.time, whole);
}

// ---- how the connection is

function onState(state, why = "") {
  const status = $("status");
  const words = state === "lost" ? "Not connected" : WORDS[state];
  if (status.dataset.state !== state || status.lastElementChild.textContent !== words) {
    status.dataset.state = state;
    status.lastElementChild.textContent = words;
  }
  if (state === "lost" && !gone()) banner(`${why}. Trying again; what you see is the last state.`);
}

const gone = () => !$("banner").hidden && $("banner").textContent.startsWith("The engine is gone");

function banner(text) {
  $("banner").hidden = text === null;
  $("banner").textContent = text ?? "";
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => stream.stop(), HIDDEN_MS);
  else stream.start();
});
let hiding = 0;

// ---- the admin key

function askForKey(error) {
  const dialog = $("key-dialog");
  $("key-error").hidden = !hasKey();
  $("key-error").textContent = error.message;
  if (!dialog.open) dialog.showModal();
}

$("key-form").addEventListener("submit", () => {
  keepKey($("key").value);
  $("key").value = "";
  stream.start();
});
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());

// ---- light and dark

const THEME = "headwater-theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
if (localStorage.getItem(THEME)) document.documentElement.dataset.theme = localStorage.getItem(THEME);
system.addEventListener("change", () => pool.restyle());
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
  pool.restyle();
});

pool.restyle();
listenExplain(askForKey);
if (document.documentElement.dataset.key === "needed" && !hasKey()) askForKey(new Error(""));
else stream.start();
setInterval(() => charts.tick(), 5000);
