// The timeline of a step, in the tab and in a page that has the events of one step inside.
// Plotly draws it.

const ROW_PX = { stream: 34, overlapping: 13, host: 16 }; // heights
const LABELS = 150; // of events at most
const LETTER_PX = 6.3;
const FEWEST_LETTERS = 5; // of a label
const HELP =
  "W and S zoom in and out, A and D move; drag to zoom, double-click for the whole step; " +
  "drag with Shift to sum up a range; click an event for all about it, a name in a table for " +
  "its longest event.";
const SIDE_BY_SIDE =
  "max-height: 400px; display: grid; gap: 16px; align-items: start; " +
  "grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr))";
// As in Perfetto: width of the range, in that of the one before, and how many of these it moves.
const KEYS = { w: [0.5, 0], s: [2, 0], a: [1, -0.25], d: [1, 0.25] };
const NOT_FOUND = "#e3e7eb";
const BLUE = "#2b5d8f";
// None of these leads elsewhere.
const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];
export const CONFIG = {
  displaylogo: false,
  responsive: true,
  showTips: false,
  typesetMath: false, // names may contain dollar signs
  modeBarButtons: BUTTONS,
};
export const FONT = {
  family: 'system-ui, "Segoe UI", Roboto, sans-serif',
  size: 12,
  color: "#1c2430",
};

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// plotly takes <b>, <a> and others in any text for markup
function safe(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function duration(ms) {
  return ms >= 1 ? `${ms.toFixed(3)} ms` : `${(1e3 * ms).toFixed(2)} us`;
}

function line(x0, x1, y0, y1, color, more) {
  return { type: "line", x0, x1, y0, y1, line: { width: 1, color }, ...more };
}

// One step, a row for each level of each lane.  Each row is a heatmap, which plotly draws on a
// canvas: thousands of events stay quick.  Where there are too many, the shortest come once the
// window is small enough.
export class Timeline {
  // ask: (parameters) => a promise of events, as analysis/report/step_zoom.py tells them.  Those
  // that are embedded in a page are the same whatever the parameters.
  constructor(place, ask) {
    this.ask = ask;
    this.steps = element("select", { className: "steps" });
    this.search = element("input", { type: "search", className: "search" });
    this.found = element("span", { className: "soft found" });
    this.note = element("p", { className: "soft", textContent: "Reading the trace …" });
    this.plot = element("div", { className: "lanes", tabIndex: 0 });
    this.tip = element("div", { className: "tip", hidden: true });
    this.about = element("div", { className: "about scroll", style: SIDE_BY_SIDE });
    this.sums = element("div", { className: "sums scroll", style: SIDE_BY_SIDE });
    const help = element("p", { className: "soft", textContent: HELP });
    const choices = [
      element("label", {}, "Step ", this.steps),
      element("label", {}, "Find ", this.search),
      this.found,
    ];
    place.append(element("div", { className: "bar" }, ...choices));
    place.append(this.plot, help, this.note, this.tip, this.about, this.sums);
    this.listen();
    this.drawn = this.show({});
  }

  listen() {
    this.steps.addEventListener("change", () => this.show({ step: this.steps.value }));
    this.search.addEventListener("input", () => this.searchAnew());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.next();
    });
    this.plot.addEventListener("mousedown", (event) => this.measure(event), true); // before plotly
    document.onkeydown = (event) => this.press(event); // of one timeline at a time
  }

  listenToPlotly() {
    const pointed = ({ points: [{ curveNumber, pointNumber }] }) =>
      this.shown[curveNumber].cells[pointNumber[1]];
    this.plot.on("plotly_relayout", (change) => this.zoomed(change));
    this.plot.on("plotly_hover", (at) => this.tell(pointed(at), at.event));
    this.plot.on("plotly_unhover", () => (this.tip.hidden = true));
    this.plot.on("plotly_click", (at) => this.describe(pointed(at)));
  }

  // window: [first, last] ms of the step; without it, the whole step.
  async show(parameters) {
    const asked = {};
    this.asked = asked;
    try {
      const answer = await this.ask(parameters);
      // An answer that comes after the next question is not shown.
      if (asked === this.asked) await this.draw(answer, !parameters.window);
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  async draw(answer, whole) {
    if (answer !== this.answer) this.chosen = -1; // events have other numbers
    const isFirst = this.answer === undefined;
    this.answer = answer;
    Object.assign(this, answer.events); // columns: name, part, start_ms, ms, above, inputs, step
    if (whole) {
      this.range = answer.window_ms;
      this.measured = null;
    }
    this.partial = !whole; // zooming out needs other events
    const { steps, step } = answer;
    const options = steps.map((number) => new Option(number, number, false, number === step));
    this.steps.replaceChildren(...options);
    const isOfTrace = answer.device !== undefined; // which may not tell its name
    const what = isOfTrace ? "part, operator or kernel" : "part of the model";
    this.search.placeholder = what;
    this.search.size = what.length;
    this.rowOf = [];
    for (const row of answer.rows) {
      for (const i of row.events) this.rowOf[i] = row;
    }
    this.findHits(whole);
    await this.color();
    if (isFirst) this.listenToPlotly();
  }

  // ---- Events by their number ------------------------------------------------------------------

  nameOf(i) {
    return this.answer.names[this.name[i]];
  }

  partOf(i) {
    return this.answer.parts[this.part[i]];
  }

  inputsOf(i) {
    return this.inputs[i] >= 0 ? this.answer.inputs[this.inputs[i]] : "";
  }

  timeOf(i) {
    return `${duration(this.ms[i])} from ${this.start_ms[i].toFixed(4)} ms on`;
  }

  endOf(i) {
    return this.start_ms[i] + this.ms[i];
  }

  inRange(i) {
    return this.start_ms[i] < this.range[1] && this.endOf(i) > this.range[0];
  }

  // ---- Find ------------------------------------------------------------------------------------

  async searchAnew() {
    this.findHits(true);
    await this.color();
  }

  // Events with the text in their name, part, class or inputs; an empty text finds everything.
  // anew: the next one is the first of them.
  findHits(anew) {
    const { names, parts, rows } = this.answer;
    const wanted = this.search.value.toLowerCase();
    const has = (text) => text.toLowerCase().includes(wanted);
    const nameHas = names.map(has);
    const partHas = parts.map((row) => has(row.part) || has(row.class));
    this.isHit = (i) => {
      if (nameHas[this.name[i]] || partHas[this.part[i]]) return true;
      return this.inputs[i] >= 0 && has(`${this.nameOf(i)} ${this.inputsOf(i)}`);
    };
    if (!anew) return;
    const hits = rows.flatMap((row) => row.events.filter(this.isHit));
    hits.sort((one, other) => one - other); // as they began
    // Numbers of events change with each answer, so that a hit is kept by what it is.
    this.hits = hits.map((i) => ({
      name: this.nameOf(i),
      start_ms: this.start_ms[i],
      ms: this.ms[i],
      on_gpu: this.rowOf[i].on_gpu,
    }));
    this.at = -1;
    this.found.textContent = wanted ? this.foundText(hits.length) : "";
  }

  foundText(count) {
    const isAll = !this.partial && !this.answer.left_out;
    const where = isAll ? "this step" : "the events that are shown";
    if (!count) return `nothing found in ${where}`;
    return `${count.toLocaleString("en")} found in ${where}; Enter shows the next`;
  }

  async next() {
    if (!this.hits.length) return;
    this.at = (this.at + 1) % this.hits.length;
    const hit = this.hits[this.at];
    await this.moveTo([hit.start_ms - 4 * hit.ms, hit.start_ms + 5 * hit.ms]);
    const i = this.start_ms.findIndex(
      (start, i) => start === hit.start_ms && this.ms[i] === hit.ms && this.nameOf(i) === hit.name,
    );
    if (i >= 0) await this.describe(i);
  }

  // The longest event with this in its name, its part, its class or its inputs; of a GPU, if one
  // has it.
  async find(text) {
    await this.drawn;
    this.search.value = text;
    await this.searchAnew();
    const onGpu = this.hits.filter((hit) => hit.on_gpu);
    const among = onGpu.length ? onGpu : this.hits;
    const longest = among.reduce((one, other) => (other.ms > one.ms ? other : one), among[0]);
    this.at = this.hits.indexOf(longest) - 1;
    this.plot.scrollIntoView({ block: "center" });
    return this.next();
  }

  // ---- Drawing ---------------------------------------------------------------------------------

  height() {
    return this.shown[this.shown.length - 1]?.bottom ?? 0;
  }

  // Of the cells, once plotly has drawn.
  area() {
    return this.plot.querySelector(".nsewdrag")?.getBoundingClientRect();
  }

  width() {
    return this.area()?.width ?? Math.max(this.plot.clientWidth - 190, 100);
  }

  // Cells lie between neighboring edges: an event, the gap after it, the next event, and so on.
  place(row, top) {
    row.x = [];
    row.cells = [];
    let end = -Infinity;
    for (const i of row.events) {
      const start = Math.max(this.start_ms[i], end);
      end = Math.max(start, this.endOf(i));
      row.x.push(start, end);
      row.cells.push(i, null);
    }
    row.cells.pop();
    const kind = row.level ? "overlapping" : "stream";
    const height = ROW_PX[row.on_gpu ? kind : "host"];
    row.y = [top + 1, top + height - 1];
    row.middle = top + height / 2;
    row.bottom = top + height;
  }

  // Colors are numbers of parts; what a search does not find is gray.
  heatmap({ x, y, cells }) {
    const { parts } = this.answer;
    const colors = [...parts.map((part) => part.color), NOT_FOUND];
    const scale = colors.flatMap((color, i) => [
      [i / colors.length, color],
      [(i + 1) / colors.length, color],
    ]);
    const colorOf = (i) => (this.isHit(i) ? this.part[i] : parts.length);
    return {
      type: "heatmap",
      x,
      y,
      z: [cells.map((i) => (i === null ? null : colorOf(i)))],
      hoverinfo: "none", // tell() shows it
      hoverongaps: false,
      colorscale: scale,
      zmin: -0.5,
      zmax: colors.length - 0.5,
      showscale: false,
    };
  }

  // Rows without an event in the range are left out, but for streams.
  async color() {
    this.shown = [];
    for (const row of this.answer.rows) {
      if ((row.on_gpu && !row.level) || row.events.some((i) => this.inRange(i))) {
        this.place(row, this.height());
        this.shown.push(row);
      }
    }
    const data = this.shown.map((row) => this.heatmap(row));
    const titled = this.shown.filter(({ on_gpu, level }) => on_gpu || !level);
    const height = Math.max(this.height(), 60);
    const layout = {
      font: FONT,
      height: 80 + height,
      margin: { t: 30, r: 16, b: 50, l: 60 },
      dragmode: "zoom",
      xaxis: { title: { text: "time since the step began (ms)" }, range: this.range },
      yaxis: {
        range: [height, 0],
        fixedrange: true,
        zeroline: false,
        showgrid: false,
        automargin: true,
        tickvals: titled.map((row) => row.middle),
        ticktext: titled.map((row) => this.title(row)),
      },
      ...this.marks(),
    };
    await Plotly.react(this.plot, data, layout, CONFIG);
    if (this.width() !== this.fitted) await Plotly.relayout(this.plot, this.marks());
    this.explain();
  }

  // In two lines where a row has room for them, so that a narrow page keeps its width for events.
  title({ lane, level, on_gpu }) {
    if (level) return "at the same time";
    return on_gpu ? safe(lane).replace(", ", ",<br>") : safe(lane);
  }

  // Lines between lanes, the range that is summed up, the event that was chosen with a line from
  // its launch; and names.
  marks() {
    const shapes = [];
    this.shown.forEach(({ level, y: [top] }, number) => {
      if (number && !level) shapes.push(line(0, 1, top, top, "#c9d0d8", { xref: "paper" }));
    });
    if (this.measured) {
      const look = { type: "rect", yref: "paper", fillcolor: `${BLUE}2e` };
      shapes.push(line(...this.measured, 0, 1, BLUE, look));
    }
    const i = this.chosen;
    const row = this.rowOf[i];
    if (this.shown.includes(row)) {
      shapes.push(line(this.start_ms[i], this.endOf(i), ...row.y, "#000", { type: "rect" }));
    }
    const call = row?.on_gpu ? this.above[i] : -1;
    const rowOfCall = this.rowOf[call];
    if (this.shown.includes(rowOfCall)) {
      const [from, to] = [this.start_ms[call], this.start_ms[i]];
      shapes.push(line(from, to, rowOfCall.middle, row.middle, "#000"));
    }
    return { shapes, annotations: this.labels() };
  }

  // Names in the cells that have room for them.
  labels() {
    const [first, last] = this.range;
    this.fitted = this.width();
    const pxPerMs = this.fitted / (last - first);
    const found = [];
    for (const { events, middle } of this.shown) {
      for (const i of events) {
        const from = Math.max(this.start_ms[i], first);
        const to = Math.min(this.endOf(i), last);
        const letters = Math.floor(((to - from) * pxPerMs - 4) / LETTER_PX);
        if (letters >= FEWEST_LETTERS) found.push({ i, from, to, middle, letters });
      }
    }
    found.sort((one, other) => other.letters - one.letters);
    return found.slice(0, LABELS).map((label) => this.annotation(label));
  }

  annotation({ i, from, to, middle, letters }) {
    const name = this.nameOf(i);
    const short = name.length > letters ? `${name.slice(0, letters - 1)}…` : name;
    const color = this.isHit(i) ? this.partOf(i).ink : "#000";
    const font = { size: 10, color };
    return { x: (from + to) / 2, y: middle, text: safe(short), showarrow: false, font };
  }

  // ---- Below the plot --------------------------------------------------------------------------

  // What the range that is shown went to and, in tables, the one that was selected.
  explain() {
    const texts = [];
    const [shown] = this.spent(this.range);
    if (shown) {
      const byPart = new Map(); // of all classes
      for (const { part, ms } of shown.rows) byPart.set(part, (byPart.get(part) ?? 0) + ms);
      const parts = [...byPart].sort(([, one], [, other]) => other - one).slice(0, 5);
      const most = parts.map(([part, ms]) => `${part} ${duration(ms)}`);
      texts.push(`Most of this range: ${most.join(", ")}.`);
    }
    if (this.answer.left_out) {
      const where = this.answer.embedded ? "TensorBoard's tab shows them" : "zoom in to see them";
      const count = this.answer.left_out.toLocaleString("en");
      texts.push(`${count} shorter events are not shown; ${where}.`);
    }
    this.note.textContent = texts.join(" ");
    const sums = this.measured ? this.spent(this.measured) : [];
    this.sums.replaceChildren(...sums.map(({ of, rows }) => this.table(of, rows)));
  }

  // Of the GPU and of the host, part, class and ms within a range, most first; they add up to it.
  spent([first, last]) {
    const length = last - first;
    return this.answer.sums.map(({ of, edges_ms: edges, part }) => {
      const within = edges.map((edge) => Math.min(Math.max(edge, first), last));
      const ms = new Map(); // by number of the part; -1: outside of the steps
      const add = (key, more) => {
        if (more > 1e-9) ms.set(key, (ms.get(key) ?? 0) + more);
      };
      part.forEach((key, i) => add(key, within[i + 1] - within[i]));
      add(-1, length - (within[within.length - 1] - within[0]));
      const rows = [];
      for (const [key, sum] of ms) {
        const { part: name, class: kind } = this.answer.parts[key] ?? {};
        const share = sum / length;
        rows.push({ part: name ?? "outside of the steps", class: kind ?? "", ms: sum, share });
      }
      rows.sort((one, other) => other.ms - one.ms);
      return { of, rows };
    });
  }

  table(of, rows) {
    const [first, last] = this.measured;
    const cell = (tag) => (textContent, i) =>
      element(tag, { textContent, className: i < 2 ? "left wrap" : "" });
    const head = [`${of}, ${first.toFixed(4)} to ${last.toFixed(4)} ms`, "class", "ms", "share"];
    const body = element("tbody");
    for (const row of [...rows, { part: "sum", class: "", ms: last - first, share: 1 }]) {
      const texts = [row.part, row.class, row.ms.toFixed(4), `${(100 * row.share).toFixed(1)}%`];
      const className = row.part === "sum" ? "total" : "";
      body.append(element("tr", { className }, ...texts.map(cell("td"))));
    }
    const titles = element("tr", {}, ...head.map(cell("th")));
    return element("table", {}, element("thead", {}, titles), body);
  }

  // Name, component and time of the event under the pointer.
  tell(i, { clientX, clientY }) {
    const name = element("b", { textContent: this.nameOf(i).slice(0, 400) });
    const part = element("div", { textContent: this.partOf(i).part });
    const time = element("div", { textContent: this.timeOf(i) });
    this.tip.replaceChildren(name, part, time);
    this.tip.hidden = false;
    const rightmost = document.documentElement.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(Math.min(clientX + 14, rightmost), 0)}px`;
    this.tip.style.top = `${clientY + 18}px`;
  }

  // All that is known of an event.
  describe(i) {
    this.chosen = i;
    const body = element("tbody");
    for (const [label, text] of Object.entries(this.facts(i))) {
      const cells = [label, text].map((textContent) => element("td", { textContent }));
      if (text) body.append(element("tr", {}, ...cells));
    }
    this.about.replaceChildren(element("table", { className: "facts" }, body));
    return Plotly.relayout(this.plot, this.marks());
  }

  // By their label; empty where they are not known.
  facts(i) {
    const { part, class: kind } = this.partOf(i);
    const { lane, where, on_gpu } = this.rowOf[i];
    const callers = [];
    for (let at = this.above[i]; at >= 0; at = this.above[at]) callers.push(at);
    const step = this.step[i] === null ? "no step" : `step ${this.step[i]}`;
    const facts = {
      Event: this.nameOf(i),
      Time: `${this.timeOf(i)}, in ${step}`,
      On: this.answer.device && on_gpu ? `${lane} (${this.answer.device})` : lane,
      "Part and class": [part, kind].filter(Boolean).join("; "),
    };
    const operator = [i, ...callers].find((at) => this.inputs[at] >= 0);
    if (operator !== undefined) {
      facts.Operator = `${this.nameOf(operator)} ${this.inputsOf(operator)}`;
    }
    if (on_gpu && callers.length) {
      const [launch] = callers;
      const later = duration(this.start_ms[i] - this.start_ms[launch]);
      facts["Launched by"] = `${this.nameOf(launch)}, ${this.timeOf(launch)}; began ${later} later`;
    }
    facts["Called by"] = callers.map((at) => this.nameOf(at)).join(" ← ");
    if (this.answer.began_ms !== null) {
      const began = (this.answer.began_ms + this.start_ms[i]).toFixed(6);
      facts["In Perfetto"] = `${began} ms, ${where}`;
    }
    return facts;
  }

  // ---- Moving about ----------------------------------------------------------------------------

  zoomed(change) {
    if (change.autosize) return this.color(); // another width: other names have room
    if (change["xaxis.autorange"]) return this.show({ step: this.answer.step });
    if (change["xaxis.range[0]"] === undefined) return;
    return this.moveTo([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  }

  // At once, so that no label stays where it was; then with the events that a shorter range has
  // room for.
  async moveTo(range) {
    this.range = range;
    this.tip.hidden = true;
    await this.color();
    const { step, left_out, embedded } = this.answer;
    if (!embedded && (left_out || this.partial)) await this.show({ step, window: range });
  }

  press({ key, target, ctrlKey, metaKey, altKey }) {
    const [zoom, pan] = KEYS[key.toLowerCase()] ?? [];
    if (!zoom || ctrlKey || metaKey || altKey || target.matches("input, select")) return;
    const { top, bottom } = this.plot.getBoundingClientRect();
    if (bottom <= 0 || top > window.innerHeight) return;
    const [first, last] = this.range;
    const width = last - first;
    const middle = (first + last) / 2 + pan * width;
    this.moveTo([middle - (zoom * width) / 2, middle + (zoom * width) / 2]);
  }

  // Drag with Shift: a range to sum up, which stays until the next one.
  measure(down) {
    this.plot.focus({ preventScroll: true }); // for the keys
    if (!down.shiftKey) return;
    down.stopPropagation();
    down.preventDefault();
    const { left, width } = this.area();
    const [first, last] = this.range;
    const at = ({ clientX }) => {
      const share = Math.min(Math.max((clientX - left) / width, 0), 1);
      return first + (last - first) * share;
    };
    const drag = (event) => {
      const ends = [at(down), at(event)].sort((one, other) => one - other);
      this.measured = ends[1] > ends[0] ? ends : null;
      Plotly.relayout(this.plot, this.marks());
      this.explain();
    };
    const drop = (event) => {
      drag(event);
      window.removeEventListener("mousemove", drag);
    };
    window.addEventListener("mousemove", drag);
    window.addEventListener("mouseup", drop, { once: true });
  }
}
