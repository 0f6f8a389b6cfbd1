// The pool map: a cell per block on a canvas, redrawn only where something changed; a second canvas for marks.

import { $, count, el, many, percent, seconds, visible } from "./dom.js";

const COLOURS = ["free", "use", "shared", "fenced", "age0", "age1", "age2", "age3", "age4", "age5"];
const CACHED = 4;
const N_NEXT = 24; // of the queue's head, how many cells are marked
const ASK_MS = 70;
const AGE_NAMES = ["just now", "seconds", "a minute", "minutes", "an hour", "longer"];

export class PoolMap {
  constructor(fetchBlock) {
    this.fetchBlock = fetchBlock;
    this.canvas = $("cells");
    this.marks = $("marks");
    this.cells = new Uint8Array(0);
    this.queue = [];
    this.next = new Set();
    this.at = null; // the block that is pointed at
    this.pinned = false; // by a click or the keyboard
    this.path = [];
    this.groups = 1;
    this.asked = 0;
    this.readColours();
    new ResizeObserver(() => this.layOut()).observe($("map"));
    this.listen();
  }

  about(about) {
    this.groups = about.n_groups;
    this.blockSize = about.block_size;
    $("pool-note").textContent =
      `${count(about.n_blocks)} blocks of ${about.block_size} tokens` +
      (about.n_groups > 1 ? ` in ${about.n_groups} groups of layers` : "");
  }

  // ---- what the server tells

  take(news) {
    const whole = news.cells !== undefined;
    const old = this.cells.length;
    if (whole) this.cells = bytes(news.cells);
    const changed = [];
    if (news.at !== undefined) {
      const places = new Uint32Array(bytes(news.at).buffer);
      const values = bytes(news.to);
      places.forEach((place, i) => {
        this.cells[place] = values[i];
        changed.push(place);
      });
    }
    if (news.queue !== undefined) {
      const before = this.next;
      this.queue = news.queue;
      this.next = new Set(news.queue.slice(0, N_NEXT));
      for (const block of before) if (!this.next.has(block)) changed.push(block);
      for (const block of this.next) if (!before.has(block)) changed.push(block);
    }
    if (news.counts !== undefined) this.tellCounts(news.counts);
    if (whole && old !== this.cells.length) this.layOut();
    else if (whole) this.drawAll();
    else for (const block of changed) this.draw(block);
    if (this.at !== null && (whole || changed.includes(this.at))) this.ask(this.at);
  }

  tellCounts(counts) {
    const ramp = el("span.ramp", { "aria-hidden": "true" }, ...AGE_NAMES.map((_, k) => el(`i.sw-age${k}`)));
    const item = (swatch, n, what) => el("li", {}, el(`i.sw-${swatch}`, { "aria-hidden": "true" }), el("b", {}, count(n)), what);
    $("legend").replaceChildren(
      item("use", counts.in_use, " in use"),
      counts.shared ? item("shared", counts.shared, " in use by several") : "",
      counts.fenced ? item("fenced", counts.fenced, " until a step is over") : "",
      el("li", {}, ramp, el("b", {}, count(counts.evictable)), " cached: used just now … over an hour ago"),
      item("free", counts.free, " free"),
      el("li", {}, el("i.sw-next", { "aria-hidden": "true" }), "evicted next"),
    );
    const all = counts.in_use + counts.shared + counts.fenced;
    $("f-pool").replaceChildren(percent(all + counts.evictable, this.cells.length), el("small", {}, "filled"));
    $("f-pool-sub").textContent = `${count(all)} in use, ${count(counts.evictable)} cached, ${count(counts.free)} free`;
    this.canvas.setAttribute(
      "aria-label",
      `Pool map: ${count(this.cells.length)} blocks, ${count(all)} in use, ${count(counts.evictable)} cached, ${count(counts.free)} free`,
    );
  }

  // ---- drawing

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    this.colours = COLOURS.map((name) => colour(`--c-${name}`));
    this.nextColour = colour("--c-next");
    this.markColour = colour("--mark");
    this.ground = colour("--card");
  }

  restyle() {
    this.readColours();
    this.drawAll();
    this.drawMarks();
  }

  layOut() {
    const n = this.cells.length;
    const width = $("map").clientWidth;
    if (!n || !width) return;
    const most = Math.max(220, Math.min(460, window.innerHeight * 0.5));
    let size = 18;
    while (size > 3 && Math.ceil(n / Math.floor(width / size)) * size > most) size -= 1;
    this.size = size;
    this.gap = size >= 4 ? 1 : 0;
    this.columns = Math.max(1, Math.floor(width / size));
    const height = Math.ceil(n / this.columns) * size;
    const scale = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.marks]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.drawAll();
    this.drawMarks();
  }

  drawAll() {
    if (!this.columns) return;
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let block = 0; block < this.cells.length; block++) this.draw(block, context);
  }

  draw(block, context = this.canvas.getContext("2d")) {
    if (!this.columns) return;
    const x = (block % this.columns) * this.size;
    const y = Math.floor(block / this.columns) * this.size;
    const side = this.size - this.gap;
    context.fillStyle = this.colours[this.cells[block] & 15];
    context.fillRect(x, y, side, side);
    if (this.next.has(block)) {
      context.fillStyle = this.nextColour;
      if (side < 6) context.fillRect(x, y, side, side);
      else context.fillRect(x, y + side - Math.max(2, side * 0.3), side, Math.max(2, side * 0.3));
    }
  }

  drawMarks() {
    const context = this.marks.getContext("2d");
    context.clearRect(0, 0, this.marks.width, this.marks.height);
    if (this.at === null || !this.columns) return;
    context.strokeStyle = context.fillStyle = this.markColour;
    const corner = (block) => [(block % this.columns) * this.size, Math.floor(block / this.columns) * this.size];
    const side = this.size - this.gap;
    for (const block of this.path) {
      const [x, y] = corner(block);
      const dot = Math.max(2, Math.round(side / 3));
      context.globalAlpha = 0.75;
      context.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    }
    context.globalAlpha = 1;
    const [x, y] = corner(this.at);
    context.lineWidth = 2;
    context.strokeRect(x - 1, y - 1, side + 2, side + 2);
  }

  // ---- pointing

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse" && !this.pinned) this.point(this.under(event));
    });
    canvas.addEventListener("pointerleave", () => {
      if (!this.pinned) this.point(null);
    });
    canvas.addEventListener("click", (event) => {
      const block = this.under(event);
      this.pinned = block !== null && !(this.pinned && block === this.at);
      this.point(block);
    });
    canvas.addEventListener("focus", () => {
      if (this.at === null && this.cells.length && canvas.matches(":focus-visible")) this.go(this.queue[0] ?? 0);
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const at = this.at ?? 0;
    const last = this.cells.length - 1;
    const moves = {
      ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + this.columns, ArrowUp: at - this.columns,
      PageDown: at + 10 * this.columns, PageUp: at - 10 * this.columns, Home: 0, End: last, n: this.queue[0] ?? at,
    };
    if (event.key === "Escape") {
      this.pinned = false;
      this.point(null);
    } else if (event.key in moves && last >= 0 && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.go(Math.max(0, Math.min(last, moves[event.key])));
    }
  }

  go(block) {
    this.pinned = true;
    this.point(block);
  }

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const block = Math.floor((event.clientY - box.top) / this.size) * this.columns + column;
    return column < this.columns && block >= 0 && block < this.cells.length ? block : null;
  }

  point(block) {
    if (block === this.at) return;
    this.at = block;
    this.path = [];
    this.drawMarks();
    clearTimeout(this.timer);
    if (block !== null) this.timer = setTimeout(() => this.ask(block), ASK_MS);
    else if (!this.pinned) this.tell(null);
  }

  async ask(block) {
    const turn = ++this.asked;
    let told;
    try {
      told = await this.fetchBlock(block);
    } catch (error) {
      told = { block, failed: error.message };
    }
    if (turn !== this.asked || this.at !== block) return; // another block is pointed at by now
    this.path = told.path ?? [];
    this.drawMarks();
    this.tell(told);
  }

  // ---- the words

  tell(told) {
    $("block-empty").hidden = told !== null;
    $("block-told").hidden = told === null;
    if (told === null) return;
    if (told.failed !== undefined) {
      $("block-title").textContent = `Block ${told.block}: ${told.failed}`;
      $("block-text").hidden = true;
      $("block-facts").replaceChildren();
      return;
    }
    $("block-title").replaceChildren(`Block ${told.block} `, el("span", {}, this.stateOf(told)));
    $("block-text").hidden = told.state === "free";
    $("block-text").replaceChildren(...tokens(told));
    $("block-facts").replaceChildren(...facts(told, this.groups));
  }

  stateOf(told) {
    if (told.state === "free") return "free: it holds nothing that can be found";
    if (told.state === "fenced") return "held only until the step that reads it is over";
    if (told.state === "in use") return told.key === null ? "in use, being filled" : `in use by ${many(told.refs, "reference")}`;
    const place = told.queue_place === 0 ? "evicted next" : `${count(told.queue_place)} to be evicted before it`;
    return `cached, last used ${seconds(told.idle_s)} ago, ${place}`;
  }
}

function tokens(told) {
  if (told.redacted && told.n_tokens) return [el("em", {}, `${told.n_tokens} tokens; their text is not shown here (--no-ui-redact shows it)`)];
  if (!told.n_tokens) return [el("em", {}, "no tokens yet")];
  if (told.token_texts.some((text) => text.includes("\ufffd"))) return [visible(told.text)];
  return told.token_texts.map((text) => el("span", {}, visible(text)));
}

function facts(told, groups) {
  if (told.state === "free") return [];
  const rows = [
    ["Tokens", `${count(told.first_token)} – ${count(told.first_token + told.n_tokens - 1)} of its prompt`],
    ["References", count(told.refs)],
    ["Hits that ended here", count(told.hits)],
    ["Children", count(told.n_children)],
    told.n_copies > 1 && ["Copies of this content", count(told.n_copies)],
    groups > 1 && ["Group of layers", `${told.group}`],
    ["Key", told.key === null ? "none until it is full" : el("code", { title: told.key }, `${told.key.slice(0, 16)}…`)],
    ["Namespace", told.namespace === null ? "–" : el("code", { title: told.namespace }, `${told.namespace.slice(0, 16)}…`)],
    told.requests.length > 0 && ["Held by", told.requests.slice(0, 3).join(", ") + (told.requests.length > 3 ? ` and ${told.requests.length - 3} more` : "")],
  ];
  return rows.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}
