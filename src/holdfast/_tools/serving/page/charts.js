// Line charts over steps: metrics, sizes, times. Values are read by pointing, by touch, or with the arrow keys.

import { setText } from "./elements.js";

const HEIGHT = 150;
const LEFT = 52;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 22;
const FEW = 9;
const MORE_IS_BETTER = /acc|score|reward|return|f1|bleu|rouge|auc|precision|recall|map\b|iou|r2|win/i;

const charts = new Map();
let showsAll = false;

export function showCharts(run) {
  const wanted = series(run.checkpoints);
  byId("charts").hidden = wanted.length === 0;
  const shown = showsAll ? wanted : wanted.slice(0, FEW);
  for (const [title, chart] of charts) {
    if (!shown.some((one) => one.key === title)) {
      chart.element.remove();
      charts.delete(title);
    }
  }
  const grid = byId("chart-grid");
  for (const [index, one] of shown.entries()) {
    let chart = charts.get(one.key);
    if (!chart) {
      chart = new Chart(one);
      charts.set(one.key, chart);
    }
    // One that is where it belongs is not touched: it may have the focus.
    if (grid.children[index] !== chart.element) grid.insertBefore(chart.element, grid.children[index] ?? null);
    chart.show(one);
  }
  const button = byId("all-charts");
  button.hidden = wanted.length <= FEW || showsAll;
  setText(button, `Show all ${wanted.length}`);
  button.onclick = () => {
    showsAll = true;
    showCharts(run);
  };
}

// What can be drawn: a line needs two steps.
function series(checkpoints) {
  const steps = checkpoints.filter((one) => one.step !== null && one.state !== "damaged");
  if (steps.length < 2) return [];
  const names = [...new Set(steps.flatMap((one) => Object.keys(one.metrics)))];
  const metrics = names.map((name) => ({
    key: `metric ${name}`,
    title: name,
    say: numberText,
    mark: (number) => (Math.abs(number) >= 1e5 || (number !== 0 && Math.abs(number) < 1e-3) ? number.toExponential(1) : String(Number(number.toPrecision(3)))),
    hasBest: true,
    points: steps.filter((one) => Object.hasOwn(one.metrics, name)).map((one) => point(one, one.metrics[name])),
  }));
  const sizes = { key: "size", title: "Size", say: sizeText, mark: sizeText, fromZero: true, points: steps.map((one) => point(one, one.bytes)) };
  const timed = steps.filter((one) => Object.keys(one.phases).length);
  const times = {
    key: "time",
    title: "Time of the save",
    say: secondsText,
    mark: secondsText,
    fromZero: true,
    points: timed.map((one) => point(one, sum(Object.values(one.phases)), phases(one.phases))),
  };
  return [...metrics, sizes, times].filter((one) => one.points.length > 1);
}

// Three to five round numbers, of which the first and the last enclose all values.
function roundMarks(low, high) {
  const rough = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
  const [first, last] = [Math.floor(low / step), Math.ceil(high / step)];
  return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
}

const sum = (numbers) => numbers.reduce((all, one) => all + one, 0);
const phases = (all) => Object.entries(all).map(([name, time]) => `${name} ${secondsText(time)}`).join(", ");

function point(one, at, more = "") {
  return { step: one.step, value: typeof at === "number" ? at : null, text: at, more, quoted: one.quoted, isAside: one.state !== "committed" };
}

class Chart {
  constructor(one) {
    this.key = one.key;
    this.at = null;
    this.isLog = recall(`log ${one.key}`) === "yes";
    this.wantsMost = recall(`best ${one.key}`) ?? (MORE_IS_BETTER.test(one.title) ? "most" : "least");
    this.readout = make("p", { class: "readout number small", "aria-live": "polite" });
    this.svg = draw("svg", { tabindex: 0, role: "img", height: HEIGHT });
    this.bestButton = make("button", { type: "button", class: "plain mini", onclick: () => this.turnBest() });
    this.logButton = make("button", { type: "button", class: "plain mini", onclick: () => this.turnLog() }, "log");
    this.element = make("figure", { class: "card chart" },
      make("figcaption", {},
        make("span", { class: "chart-title wrap" }, one.title),
        one.hasBest ? this.bestButton : null,
        this.logButton),
      this.readout, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event.clientX));
    this.svg.addEventListener("pointerdown", (event) => this.pointAt(event.clientX));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    this.svg.addEventListener("click", (event) => event.pointerType !== "touch" && this.open());
    new ResizeObserver(() => this.redraw()).observe(this.element);
  }

  show(one) {
    const content = JSON.stringify(one.points);
    if (content === this.content) return;
    this.content = content;
    this.one = one;
    this.points = one.points;
    this.numbers = one.points.filter((one) => one.value !== null);
    this.canBeLog = this.numbers.every((one) => one.value > 0) && this.numbers.length > 0;
    this.logButton.hidden = !this.canBeLog;
    this.at = null;
    this.redraw();
  }

  turnLog() {
    this.isLog = !this.isLog;
    keepInMind(`log ${this.key}`, this.isLog ? "yes" : "no");
    this.redraw();
  }

  turnBest() {
    this.wantsMost = this.wantsMost === "most" ? "least" : "most";
    keepInMind(`best ${this.key}`, this.wantsMost);
    this.redraw();
  }

  redraw() {
    if (!this.points) return;
    const width = this.svg.clientWidth || 300;
    const isLog = this.isLog && this.canBeLog;
    const scale = isLog ? Math.log10 : (number) => number;
    const values = this.numbers.map((one) => scale(one.value));
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (this.one.fromZero && !isLog) low = 0;
    if (!(high > low)) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
    const marks = isLog ? [10 ** low, 10 ** ((low + high) / 2), 10 ** high] : roundMarks(low, high);
    const labels = marks.map((number) => this.one.mark(number));
    if (!isLog) [low, high] = [marks[0], marks.at(-1)];
    const [first, last] = [this.points[0].step, this.points.at(-1).step];
    this.x = (step) => LEFT + ((step - first) / (last - first || 1)) * (width - LEFT - RIGHT);
    this.y = (number) => TOP + (1 - (scale(number) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.logButton.setAttribute("aria-pressed", String(isLog));
    setText(this.bestButton, this.wantsMost === "most" ? "best: highest" : "best: lowest");
    this.mark = draw("g", { class: "mark" });
    this.svg.setAttribute("aria-label", `${this.one.title} over ${this.points.length} steps. Arrow keys go through the values, Enter opens one.`);
    this.svg.replaceChildren(
      ...marks.map((number, index) => this.gridLine(number, labels.indexOf(labels[index]) === index ? labels[index] : "", width)),
      draw("text", { x: LEFT, y: HEIGHT - 6 }, countText(first)),
      draw("text", { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, countText(last)),
      ...this.lines(),
      ...this.dots(),
      ...this.bestMark(),
      this.mark);
    this.choose(this.at);
  }

  gridLine(number, label, width) {
    const y = this.y(number);
    return draw("g", {},
      draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      draw("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, label));
  }

  // A value that is NaN interrupts the line.
  lines() {
    const parts = [[]];
    for (const one of this.points) {
      if (one.value === null) parts.push([]);
      else parts.at(-1).push(`${this.x(one.step).toFixed(1)},${this.y(one.value).toFixed(1)}`);
    }
    return parts.filter((part) => part.length > 1).map((part) => draw("polyline", { class: "line", points: part.join(" ") }));
  }

  dots() {
    if (this.points.length > 80) return [];
    return this.points.map((one) => one.value === null
      ? draw("text", { class: "no-number", x: this.x(one.step), y: HEIGHT - BOTTOM, "text-anchor": "middle" }, "×")
      : draw("circle", { class: one.isAside ? "dot aside" : "dot", cx: this.x(one.step), cy: this.y(one.value), r: 3 }));
  }

  // Of equals the newer one, as the manager has it.
  best() {
    const usable = this.numbers.filter((one) => !one.isAside);
    if (!this.one.hasBest || usable.length === 0) return null;
    const sign = this.wantsMost === "most" ? 1 : -1;
    return usable.reduce((best, one) => (sign * (one.value - best.value) >= 0 ? one : best));
  }

  bestMark() {
    const best = this.best();
    return best ? [draw("circle", { class: "best", cx: this.x(best.step), cy: this.y(best.value), r: 6 })] : [];
  }

  pointAt(clientX) {
    const x = clientX - this.svg.getBoundingClientRect().left;
    const far = (index) => Math.abs(this.x(this.points[index].step) - x);
    let nearest = 0;
    for (let index = 1; index < this.points.length; index += 1) if (far(index) <= far(nearest)) nearest = index;
    this.choose(nearest);
  }

  press(event) {
    const end = this.points.length - 1;
    const at = this.at ?? (event.key === "ArrowLeft" ? end + 1 : -1);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: end }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.choose(Math.max(0, Math.min(end, to)));
    } else if (event.key === "Enter") this.open();
    else if (event.key === "Escape") this.choose(null);
  }

  open() {
    if (this.at !== null) location.href = `/c/${this.points[this.at].quoted}`;
  }

  choose(index) {
    this.at = index;
    this.mark.replaceChildren();
    const best = this.best();
    if (index === null) {
      const last = this.points.at(-1);
      const now = last.value === null ? String(last.text) : this.one.say(last.value);
      setText(this.readout, best ? `now ${now} · best ${this.one.say(best.value)} at step ${countText(best.step)}` : `now ${now}`);
      return;
    }
    const one = this.points[index];
    const shown = one.value === null ? String(one.text) : this.one.say(one.value);
    const notes = [one === best ? "best" : "", one.isAside ? "set aside" : "", one.more].filter(Boolean);
    setText(this.readout, [`step ${countText(one.step)}: ${shown}`, ...notes].join(" · "));
    const x = this.x(one.step);
    this.mark.append(draw("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    if (one.value !== null) this.mark.append(draw("circle", { cx: x, cy: this.y(one.value), r: 5 }));
  }
}
