// The counters over the last minutes: small charts, drawn here.

import { $, count, el, percent, rate } from "./dom.js";

const SPAN_S = 300;
const BUCKET_S = 5;
const WIDTH = 300;
const HEIGHT = 64;
const [TIME, QUERIES, HITS, COPIED, COMPUTED, GENERATED, , , RUNNING, WAITING, IN_USE, EVICTABLE, FREE] = Array(13).keys();

export class Charts {
  constructor() {
    this.samples = [];
    this.charts = {
      prompt: new Chart("Prompt tokens per second", ["a", "b"]),
      generated: new Chart("Generated tokens per second", ["c"]),
      requests: new Chart("Requests", ["b", "c"]),
      blocks: new Chart("Blocks", ["b", "a"]),
    };
    $("charts").append(...Object.values(this.charts).map((chart) => chart.root));
  }

  take(samples, now, whole) {
    this.samples = (whole ? samples : [...this.samples, ...samples]).filter((sample) => sample[TIME] > now - SPAN_S - 2 * BUCKET_S);
    this.now = now;
    this.skew = now - Date.now() / 1000;
    this.draw();
  }

  tick() {
    if (this.samples.length) {
      this.now = Date.now() / 1000 + this.skew;
      this.draw();
    }
  }

  draw() {
    const cached = this.rates((sample) => sample[HITS] + sample[COPIED]);
    const computed = this.rates((sample) => sample[COMPUTED]);
    const generated = this.rates((sample) => sample[GENERATED]);
    const last = (values) => values[values.length - 2] ?? 0; // the newest full bucket
    this.charts.prompt.draw(stack(cached, computed), [["a", rate(last(cached)), "cached"], ["b", rate(last(computed)), "computed"]]);
    this.charts.generated.draw([generated], [["c", rate(last(generated)), "a second"]]);
    const running = this.levels(RUNNING), waiting = this.levels(WAITING);
    const newest = this.samples[this.samples.length - 1] ?? [];
    this.charts.requests.draw(stack(running, waiting), [["b", count(newest[RUNNING] ?? 0), "running"], ["c", count(newest[WAITING] ?? 0), "waiting"]]);
    const total = (newest[IN_USE] ?? 0) + (newest[EVICTABLE] ?? 0) + (newest[FREE] ?? 0);
    this.charts.blocks.draw(stack(this.levels(IN_USE), this.levels(EVICTABLE)), [["b", count(newest[IN_USE] ?? 0), "in use"], ["a", count(newest[EVICTABLE] ?? 0), "cached"]], total);
    this.figures();
  }

  // A counter's growth per second, bucket by bucket.
  rates(value) {
    const at = this.interpolated(value);
    return at.slice(1).map((v, i) => Math.max(0, v - at[i]) / BUCKET_S);
  }

  levels(column) {
    return this.interpolated((sample) => sample[column], 0).slice(1);
  }

  // The values at the ends of all buckets; before the first sample a counter is as in it, a level is 0.
  interpolated(value, before) {
    const ends = [];
    let i = 0;
    const first = Math.floor(this.now / BUCKET_S) * BUCKET_S - SPAN_S;
    for (let end = first; end < this.now + BUCKET_S; end += BUCKET_S) {
      while (i + 1 < this.samples.length && this.samples[i + 1][TIME] <= end) i++;
      const sample = this.samples[i];
      if (!sample) ends.push(0);
      else ends.push(sample[TIME] > end && before !== undefined ? before : value(sample));
    }
    return ends;
  }

  figures() {
    const first = this.samples[0], newest = this.samples[this.samples.length - 1];
    if (!newest) return;
    const asked = newest[QUERIES] - first[QUERIES];
    const reused = newest[HITS] + newest[COPIED] - first[HITS] - first[COPIED];
    const allReused = newest[HITS] + newest[COPIED];
    if (asked > 0) {
      $("f-reused").textContent = percent(reused, asked);
      $("f-reused-sub").textContent = `${count(reused)} of ${count(asked)} prompt tokens in 5 minutes`;
    } else if (newest[QUERIES] > 0) {
      $("f-reused").textContent = percent(allReused, newest[QUERIES]);
      $("f-reused-sub").textContent = `${count(allReused)} of ${count(newest[QUERIES])} prompt tokens since the start`;
    }
    $("f-running").replaceChildren(count(newest[RUNNING]), el("small", {}, "running"));
    $("f-running-sub").textContent = `${count(newest[WAITING])} waiting`;
    const generated = this.rates((sample) => sample[GENERATED]);
    $("f-rate").replaceChildren(rate(Math.max(0, generated[generated.length - 2] ?? 0)), el("small", {}, "tokens/s"));
    $("f-rate-sub").textContent = `${count(newest[GENERATED])} tokens since the start`;
  }
}

class Chart {
  constructor(title, kinds) {
    this.title = title;
    this.paths = kinds.map((kind) => shape("path", { class: kind }));
    const base = shape("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT, "vector-effect": "non-scaling-stroke" });
    // the upper of two stacked areas is drawn first, the lower over it
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, base, ...[...this.paths].reverse());
    this.words = el("p.now");
    this.most = el("span");
    this.root = el("figure.chart", {}, el("h3", {}, title), this.words, this.svg, el("p.axis", {}, el("span", {}, "5 min ago"), this.most, el("span", {}, "now")));
    this.root.style.margin = "0";
  }

  draw(series, words, most = 0) {
    const top = Math.max(most, ...series.flat(), 1e-9);
    series.forEach((values, i) => this.paths[i].setAttribute("d", area(values, top)));
    this.words.replaceChildren(...words.map(([kind, value, name]) => el("span", {}, value, " ", el(`small.dot.${kind}`, {}, name))));
    this.most.textContent = top > 1e-9 ? `${most ? "of" : "most"} ${Number.isInteger(top) ? count(top) : rate(top)}` : "";
    this.svg.setAttribute("aria-label", `${this.title}: ${words.map(([, value, name]) => `${value} ${name}`).join(", ")}`);
  }
}

function area(values, top) {
  const step = WIDTH / Math.max(1, values.length - 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)} ${(HEIGHT - (value / top) * (HEIGHT - 2)).toFixed(1)}`);
  return `M0 ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`;
}

const stack = (lower, upper) => [lower, lower.map((value, i) => value + upper[i])];

function shape(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
