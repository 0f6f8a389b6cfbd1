// Requests as they end, newest first: a bar, the time to the first token, and why the hit stopped there.

import { accountOf } from "./account.js";
import { $, clock, count, el, seconds } from "./dom.js";

const KEEP = 100;
const FIRST = 7;

export class Requests {
  constructor() {
    this.list = $("request-list");
    this.requests = [];
    this.open = new Set();
    this.all = false;
    $("requests-more").addEventListener("click", () => {
      this.all = !this.all;
      this.draw();
    });
    $("curl").textContent =
      `curl ${location.origin}/v1/completions \\\n  -H 'Content-Type: application/json' \\\n` +
      `  -d '{"prompt": "A headwater is where a river begins, far from its mouth. A tributary is", "max_tokens": 16}'`;
  }

  restart() {
    this.requests = [];
  }

  take(requests) {
    if (!requests.length && this.requests.length) return;
    const known = new Set(this.requests.map((request) => request.id));
    const fresh = requests.filter((request) => !known.has(request.id));
    if (!fresh.length && known.size) return;
    this.fresh = known.size ? new Set(fresh.map((request) => request.id)) : new Set();
    this.requests = [...fresh, ...this.requests].slice(0, KEEP);
    this.draw();
  }

  draw() {
    // what somebody reads stays, however many come after it
    const shown = this.requests.filter((request, i) => this.all || i < FIRST || this.open.has(request.id));
    const most = Math.max(1, ...this.requests.map((request) => request.n_prompt + request.n_generated));
    const focus = document.activeElement?.closest?.("#request-list [data-request]")?.dataset.request;
    this.list.replaceChildren(...shown.map((request) => this.item(request, most)));
    this.fresh = new Set();
    if (focus) this.list.querySelector(`[data-request="${CSS.escape(focus)}"] .open`)?.focus({ preventScroll: true });
    $("requests-empty").hidden = this.requests.length > 0;
    this.list.hidden = this.requests.length === 0;
    this.list.classList.toggle("all", this.all);
    const more = $("requests-more");
    more.hidden = this.requests.length <= FIRST;
    more.textContent = this.all ? "Show fewer" : `Show all ${this.requests.length}`;
  }

  item(request, most) {
    const item = el(this.fresh?.has(request.id) ? "li.new" : "li", { "data-request": request.id });
    const open = this.open.has(request.id);
    const button = el(
      "button.open",
      { type: "button", "aria-expanded": open ? "true" : "false", onclick: () => this.toggle(request, item, button) },
      el(
        "span.line",
        {},
        el("b", {}, `${count(request.n_prompt)} tokens`),
        el("span", {}, share(request)),
        el("span.right", {}, request.ttft_s === null ? "" : `first token ${seconds(request.ttft_s)}`),
        el("time", {}, clock(request.arrived)),
      ),
      bar(request, most),
      request.account ? el("span.why", {}, request.account.stop.sentence) : "",
    );
    item.append(button);
    if (open && request.account) item.append(this.whole(request));
    return item;
  }

  toggle(request, item, button) {
    const open = !this.open.has(request.id);
    if (open) this.open.add(request.id);
    else this.open.delete(request.id);
    button.setAttribute("aria-expanded", open);
    item.querySelector(".account")?.remove();
    if (open && request.account) item.append(this.whole(request));
  }

  whole(request) {
    const told = accountOf(request.account);
    told.querySelector(".sentence").remove(); // it stands above
    told.append(el("p.note", {}, request.id));
    return told;
  }
}

function share(request) {
  if (!request.n_cached) return "nothing cached";
  return `${Math.floor((100 * request.n_cached) / request.n_prompt)} % cached`;
}

function bar(request, most) {
  const computed = request.n_prompt - request.n_cached;
  const told = `${count(request.n_cached)} tokens cached, ${count(computed)} computed, ${count(request.n_generated)} generated`;
  const made = el("span.bar", { role: "img", "aria-label": told, title: told });
  for (const [kind, n] of [["cached", request.n_cached], ["computed", computed], ["generated", request.n_generated]]) {
    if (!n) continue;
    const piece = el(`i.${kind}`);
    piece.style.width = `${(100 * n) / most}%`;
    made.append(piece);
  }
  return made;
}
