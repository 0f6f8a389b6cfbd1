// The account of one prompt: what was reused, where that stopped and why.

import { count, el, many, seconds, visible } from "./dom.js";

const STATES = {
  hit: "reused", copied: "copied from a block that begins alike", computing: "being computed now by another request",
  held: "in memory behind the stop, of no use from there", evicted: "was held, evicted since", unknown: "not recorded: computed",
};
const BARS = { hit: "cached", copied: "copied" };

export function accountOf(account) {
  return el(
    "div.account",
    {},
    el("p.sentence", {}, account.stop.sentence),
    runsBar(account),
    el("div.runs", {}, ...account.runs.flatMap(run)),
    difference(account.difference),
    ...remarks(account),
  );
}

function runsBar(account) {
  const bar = el("div.bar", { role: "img", "aria-label": `${count(account.hit_tokens)} of ${count(account.n_tokens)} tokens reused` });
  for (const part of account.runs) {
    const piece = el(`i.${BARS[part.state] ?? part.state}`);
    piece.style.flex = `${part.tokens} 1 0`;
    bar.append(piece);
  }
  return bar;
}

function run(part) {
  const last = part.first + part.tokens - 1;
  return [
    el("span.n", {}, part.tokens === 1 ? `token ${count(part.first)}` : `${count(part.first)} – ${count(last)}`),
    el("span.n", {}, many(part.tokens, "token")),
    el("span", {}, (STATES[part.state] ?? part.state) + (part.blocks ? ` (${many(part.blocks, "block")})` : "")),
  ];
}

function difference(found) {
  if (!found) return null;
  const rows = [];
  const side = (name, tokens, missing) =>
    rows.push(el("p", {}, el("span", {}, name), tokens ? el("code", {}, found.before ? visible(found.before.text) : "", el("mark", {}, visible(tokens.text))) : el("span.note", {}, missing)));
  if (found.redacted) rows.push(el("p.note", {}, "The text on both sides is not shown here."));
  else {
    side("this one", found.ours, "nothing more");
    side("recorded", found.theirs, "not yours to see");
  }
  if (found.message) {
    const message = `message ${found.message.index}${found.message.role ? ` (${found.message.role})` : ""}`;
    const where = `${found.message.part === "template" ? "the chat template's text" : message}, character ${count(found.message.character)}`;
    rows.push(el("p", {}, el("span", {}, "where"), el("span", {}, where)));
  }
  return el("div.sides", {}, ...rows);
}

function remarks(account) {
  const told = [];
  const stop = account.stop;
  if (stop.evicted_ago_s !== null && stop.evicted_ago_s !== undefined) {
    told.push(`Evicted ${seconds(stop.evicted_ago_s)} ago${stop.request ? `, for ${stop.request}` : ""}.`);
  }
  if (account.smallest_reusable_prefix) told.push(`The shortest beginning that can be reused has ${many(account.smallest_reusable_prefix, "token")}.`);
  const estimate = account.estimate;
  if (estimate) {
    const time = estimate.seconds === null ? "" : `, about ${seconds(estimate.seconds)}`;
    told.push(`To compute: ${many(estimate.compute_tokens, "token")}${time}.`);
  }
  return told.map((text) => el("p.note", {}, text));
}
