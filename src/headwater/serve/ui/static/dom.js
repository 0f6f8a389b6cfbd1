// Elements and figures. Text is only ever put in as text: nothing here, or anywhere on the page, parses markup.

export const $ = (id) => document.getElementById(id);

// el("p.note", {title: "..."}, "text", child, ...): null and false are left out.
export function el(what, props = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof made[name] !== "object") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => whole.format(Math.round(n));
export const short = (n) => (Math.abs(n) < 10000 ? count(n) : compact.format(n));
export const many = (n, what) => `${count(n)} ${what}${n === 1 ? "" : what.endsWith("h") ? "es" : "s"}`;
export const percent = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");
export const rate = (n) => (n === 0 ? "0" : n < 10 ? n.toFixed(1) : short(n));

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${s.toFixed(s < 10 ? 1 : 0)} s`;
  if (s < 3600) return `${Math.round(s / 60)} min`;
  return s < 86400 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} days`;
}

export const clock = (s) => new Date(s * 1000).toLocaleTimeString("en-GB");

// What is no visible character in a text of tokens is shown by a sign.
export const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t");
export const oneLine = (text) => text.replace(/\s*\n\s*/g, " ↵ ").replace(/\t/g, " ");
