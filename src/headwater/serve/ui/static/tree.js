// The prefixes as a tree: what the stream brings is open, what lies deeper is fetched when it is opened.

import { $, count, el, many, oneLine, short } from "./dom.js";

const FEW = 3; // a branch of which fewer children are known, but not all, is shut until it is opened

export class PrefixTree {
  constructor(fetchBelow) {
    this.fetchBelow = fetchBelow;
    this.list = $("tree");
    this.rows = [];
    this.below = new Map(); // branch -> rows that were fetched
    this.toggled = new Map(); // branch -> open or shut, by the reader
    this.current = null; // the branch that has the focus, or would get it
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.list.addEventListener("click", (event) => this.click(event));
    this.list.addEventListener("focusin", (event) => this.focused(event.target.closest("[role=treeitem]")));
  }

  take(tree) {
    this.rows = tree.rows;
    const n = tree.n_branches;
    $("tree-note").textContent = n ? many(n, "branch") : "";
    $("tree-empty").hidden = n > 0;
    this.list.hidden = n === 0;
    document.querySelector(".tree-head").hidden = n === 0;
    this.draw();
    for (const [branch, open] of this.toggled) if (open && this.below.has(branch)) this.fetch(branch);
  }

  async fetch(branch) {
    try {
      this.below.set(branch, (await this.fetchBelow(branch)).rows);
    } catch {
      this.below.delete(branch); // evicted and forgotten since: the next picture is without it
      this.toggled.delete(branch);
    }
    this.draw();
  }

  // ---- drawing

  draw() {
    const children = new Map();
    const known = new Map();
    const add = (row) => {
      if (known.has(row.id)) return;
      known.set(row.id, row);
      if (!children.has(row.parent)) children.set(row.parent, []);
      children.get(row.parent).push(row);
    };
    this.rows.forEach(add);
    for (const rows of this.below.values()) rows.forEach(add);
    const most = Math.max(1, ...(children.get(null) ?? []).map((row) => row.tokens_held_in_all));
    const hadFocus = this.list.contains(document.activeElement);
    const scroll = window.scrollY;
    this.known = known;
    this.list.replaceChildren(...this.items(null, children, most, 1));
    const items = [...this.list.querySelectorAll("[role=treeitem]")];
    const focus = items.find((item) => item.dataset.branch === this.current) ?? items[0];
    if (focus) {
      focus.tabIndex = 0;
      if (hadFocus) focus.focus({ preventScroll: true });
    }
    if (window.scrollY !== scroll) window.scrollTo(0, scroll);
  }

  items(parent, children, most, level) {
    const rows = (children.get(parent) ?? []).sort((a, b) => b.tokens_held_in_all - a.tokens_held_in_all);
    return rows.map((row) => {
      const inside = children.get(row.id) ?? [];
      const worthIt = parent === null || inside.length === row.n_children || inside.length >= FEW;
      const open = this.toggled.get(row.id) ?? (inside.length > 0 && worthIt);
      const item = el("li", { role: "treeitem", tabIndex: -1, "aria-level": level, "data-branch": row.id }, this.line(row, most));
      item.setAttribute("aria-label", label(row));
      if (!row.n_children) return item;
      item.setAttribute("aria-expanded", open);
      if (open) {
        const list = el("ul", { role: "group" }, ...this.items(row.id, children, most, level + 1));
        const left = row.n_children - inside.length;
        if (left > 0) list.append(el("li.rest", { role: "none" }, this.rest(row, left)));
        item.append(list);
      }
      return item;
    });
  }

  rest(row, left) {
    if (this.below.has(row.id)) return `and ${many(left, "smaller branch")}`;
    return el("button", { type: "button", "data-more": row.id, tabIndex: -1 }, `Show ${many(left, "more branch")}`);
  }

  line(row, most) {
    const bar = el("b");
    bar.style.width = `${Math.max(2, (100 * row.tokens_held_in_all) / most)}%`;
    const root = row.parent === null;
    return el(
      root ? "div.line.root" : "div.line",
      {},
      el(
        "span.what",
        {},
        el("span.twist", { "aria-hidden": "true" }, row.n_children ? "▶" : ""),
        root ? namespace(row) : el("span.text", { title: row.text ?? "" }, text(row)),
        root || row.n_children === 0 ? "" : el("span.count", {}, `×${count(row.n_children)}`),
      ),
      el("span.held", {}, el("i", { "aria-hidden": "true" }, bar), el("span", {}, short(row.tokens_held_in_all))),
      el(row.hits ? "span.hits" : "span.hits.none", {}, short(row.hits)),
    );
  }

  // ---- reading it

  click(event) {
    const more = event.target.closest("[data-more]");
    if (more) {
      this.toggled.set(more.dataset.more, true);
      this.fetch(more.dataset.more);
      return;
    }
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    this.current = item.dataset.branch;
    item.focus({ preventScroll: true });
    if (item.hasAttribute("aria-expanded")) this.toggle(item);
  }

  toggle(item) {
    const branch = item.dataset.branch;
    const open = item.getAttribute("aria-expanded") !== "true";
    this.toggled.set(branch, open);
    const known = this.rows.filter((row) => row.parent === branch).length;
    const all = known === this.known.get(branch).n_children || this.below.has(branch);
    if (open && known < FEW && !all) this.fetch(branch);
    this.draw();
  }

  focused(item) {
    if (!item) return;
    this.current = item.dataset.branch;
    for (const other of this.list.querySelectorAll("[role=treeitem][tabindex='0']")) other.tabIndex = -1;
    item.tabIndex = 0;
  }

  key(event) {
    const item = event.target.closest("[role=treeitem]");
    if (!item) return;
    const items = [...this.list.querySelectorAll("[role=treeitem]")];
    const place = items.indexOf(item);
    const open = item.getAttribute("aria-expanded");
    let to = null;
    if (event.key === "ArrowDown") to = items[place + 1];
    else if (event.key === "ArrowUp") to = items[place - 1];
    else if (event.key === "Home") to = items[0];
    else if (event.key === "End") to = items[items.length - 1];
    else if (event.key === "ArrowRight" && open === "true") to = items[place + 1];
    else if (event.key === "ArrowLeft" && open !== "true") to = item.parentElement.closest("[role=treeitem]");
    else if (event.key === "ArrowRight" && open === "false") this.toggle(item);
    else if (event.key === "ArrowLeft" && open === "true") this.toggle(item);
    else if ((event.key === "Enter" || event.key === " ") && open !== null) this.toggle(item);
    else return;
    event.preventDefault();
    if (to) to.focus();
  }
}

function text(row) {
  if (row.text === null) return `${count(row.tokens)} tokens from token ${count(row.start)} on`;
  return oneLine(row.text);
}

function namespace(row) {
  const kind = row.salted ? "Salted namespace " : "Namespace ";
  const adapters = row.adapters ? `, ${many(row.adapters, "adapter")}` : "";
  return el("span.text", {}, kind, el("code", {}, row.id.slice(0, 12)), adapters);
}

function label(row) {
  const name = row.parent === null ? `namespace ${row.id.slice(0, 12)}` : text(row);
  return `${name}; ${count(row.tokens_held_in_all)} tokens held, ${many(row.hits, "hit")}, ${many(row.n_children, "branch")} below`;
}
