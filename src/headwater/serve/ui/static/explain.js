// A pasted request, explained without running it.

import { accountOf } from "./account.js";
import { post } from "./api.js";
import { $, el } from "./dom.js";

export function listen(onKeyNeeded) {
  const go = () => explain(onKeyNeeded);
  $("explain-go").addEventListener("click", go);
  $("body").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
  });
}

async function explain(onKeyNeeded) {
  const button = $("explain-go");
  const text = $("body").value.trim() || $("body").placeholder;
  const answer = (...what) => $("explain-answer").replaceChildren(...what);
  try {
    JSON.parse(text);
  } catch (error) {
    answer(el("p.error", {}, `This is not JSON: ${error.message}`));
    return;
  }
  button.disabled = true;
  try {
    const told = await post("v1/explain", text);
    answer(...(told.prompts ?? [told]).map(accountOf));
  } catch (error) {
    answer(el("p.error", {}, error.message));
    if (error.status === 401) onKeyNeeded(error);
  } finally {
    button.disabled = false;
  }
}
