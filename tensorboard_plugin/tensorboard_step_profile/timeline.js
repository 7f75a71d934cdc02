// The timeline of a step, in the tab and in a page that has the events of one step inside.  Plotly draws it.

const PX = { stream: 34, overlapping: 13, host: 16 }; // heights of rows
const HELP = "W and S zoom in and out, A and D move; drag to zoom, double-click for the whole step; drag with Shift to sum up a "
  + "range; click an event for all about it, a name in a table for its longest event.";
const SIDE_BY_SIDE = "max-height: 400px; display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 16px; align-items: start";
const KEYS = { w: [0.5, 0], s: [2, 0], a: [1, -0.25], d: [1, 0.25] }; // as in Perfetto: width of the range, move by
const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]]; // none that leads elsewhere
export const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: BUTTONS };
export const FONT = { family: 'system-ui, "Segoe UI", Roboto, sans-serif', size: 12, color: "#1c2430" };

export const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
// plotly takes <b>, <a> and others in any text for markup
const safe = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const duration = (ms) => (ms >= 1 ? `${ms.toFixed(3)} ms` : `${(1e3 * ms).toFixed(2)} us`);

// One step, a row for each level of each lane.  Each row is a heatmap, which plotly draws on a canvas: thousands of
// events stay quick.  Where there are too many, the shortest come once the window is small enough.
export class Timeline {
  // ask: (parameters) => a promise of events, as analysis/report/step_zoom.py tells them.  Of one step that is embedded
  // in a page it gives the same events whatever the parameters.
  constructor(place, ask) {
    this.ask = ask;
    this.steps = element("select", { className: "steps", onchange: () => this.show({ step: this.steps.value }) });
    const placeholder = "operator, kernel or component";
    this.search = element("input", { type: "search", className: "search", placeholder, size: placeholder.length });
    this.search.oninput = () => this.color(true);
    this.search.onkeydown = (event) => event.key === "Enter" && this.next();
    this.found = element("span", { className: "soft found" });
    this.note = element("p", { className: "soft", textContent: "Reading the trace …" });
    this.plot = element("div", { className: "lanes", tabIndex: 0, style: "outline-color: #c9d0d8" });
    this.tip = element("div", { className: "tip", hidden: true });
    this.about = element("div", { className: "about scroll", style: SIDE_BY_SIDE });
    this.sums = element("div", { className: "sums scroll", style: SIDE_BY_SIDE });
    const labels = [element("label", {}, "Step ", this.steps), element("label", {}, "Find ", this.search)];
    place.append(element("div", { className: "bar" }, ...labels, this.found), this.plot);
    place.append(element("p", { className: "soft", textContent: HELP }), this.note, this.tip, this.about, this.sums);
    this.plot.addEventListener("mousedown", (event) => this.measure(event), true); // before plotly does
    document.onkeydown = (event) => this.press(event);
    this.drawn = this.show({});
  }

  // window: [first, last] ms of the step; without it, the whole step.
  async show(parameters) {
    const asked = (this.asked = {}); // an answer that comes after the next question is not shown
    try {
      const answer = await this.ask(parameters);
      if (asked === this.asked) await this.draw(answer, !parameters.window);
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  async draw(answer, whole) {
    if (answer !== this.answer) this.chosen = -1; // events have other numbers
    Object.assign(this, answer.events, { answer });
    const { steps, step, window_ms, rows } = answer;
    if (whole) Object.assign(this, { range: window_ms, measured: null });
    this.partial = !whole; // zooming out needs other events
    this.steps.replaceChildren(...steps.map((number) => new Option(number, number, false, number === step)));
    this.rowOf = [];
    for (const row of rows) row.events.forEach((i) => (this.rowOf[i] = row));
    await this.color(whole);
    if (this.listening) return;
    this.listening = true;
    const pointed = ({ points: [{ curveNumber, pointNumber }] }) => this.shown[curveNumber].cells[pointNumber[1]];
    this.plot.on("plotly_relayout", (change) => this.zoomed(change));
    this.plot.on("plotly_hover", (at) => this.tell(pointed(at), at.event));
    this.plot.on("plotly_unhover", () => (this.tip.hidden = true));
    this.plot.on("plotly_click", (at) => this.describe(pointed(at)));
  }

  named = (i) => this.answer.names[this.name[i]];
  partOf = (i) => this.answer.parts[this.part[i]];
  time = (i) => `${duration(this.ms[i])} from ${this.start_ms[i].toFixed(4)} ms on`;
  end = (i) => this.start_ms[i] + this.ms[i];
  inRange = (i) => this.start_ms[i] < this.range[1] && this.end(i) > this.range[0];
  height = () => this.shown[this.shown.length - 1]?.bottom ?? 0;
  area = () => this.plot.querySelector(".nsewdrag")?.getBoundingClientRect(); // of the cells, once plotly has drawn
  width = () => this.area()?.width ?? Math.max(this.plot.clientWidth - 190, 100);
  zoom = (first, last) => Plotly.relayout(this.plot, { "xaxis.range[0]": first, "xaxis.range[1]": last });

  // Cells lie between neighboring edges: an event, the gap after it, the next event, and so on.
  heatmap(row, top) {
    const x = [], cells = [];
    for (const i of row.events) {
      const edge = Math.max(this.start_ms[i], x.length ? x[x.length - 1] : -Infinity);
      x.push(edge, Math.max(edge, this.end(i)));
      cells.push(i, null);
    }
    cells.pop();
    const height = PX[!row.on_gpu ? "host" : row.level ? "overlapping" : "stream"];
    return Object.assign(row, { x, cells, y: [top + 1, top + height - 1], middle: top + height / 2, bottom: top + height });
  }

  // Colors are numbers of parts; what a search does not find is gray.  Rows without an event in the range are left out,
  // but of streams.  anew: the search begins from the first that it finds.
  async color(anew) {
    const { names, parts, inputs, rows } = this.answer;
    const wanted = this.search.value.toLowerCase();
    const hit = (text) => text.toLowerCase().includes(wanted);
    const [nameHit, partHit] = [names.map(hit), parts.map((one) => hit(one.part) || hit(one.class))];
    const shapeHit = (i) => this.inputs[i] >= 0 && hit(`${this.named(i)} ${inputs[this.inputs[i]]}`);
    this.isHit = (i) => nameHit[this.name[i]] || partHit[this.part[i]] || shapeHit(i); // an empty search finds everything
    const colors = [...parts.map((part) => part.color), "#e3e7eb"];
    const scale = colors.flatMap((color, i) => [[i / colors.length, color], [(i + 1) / colors.length, color]]);
    this.shown = [];
    for (const row of rows) if ((row.on_gpu && !row.level) || row.events.some(this.inRange)) this.shown.push(this.heatmap(row, this.height()));
    const data = this.shown.map(({ x, y, cells }) => ({
      type: "heatmap", x, y, z: [cells.map((i) => (i === null ? null : this.isHit(i) ? this.part[i] : parts.length))],
      hoverinfo: "none", hoverongaps: false, // tell() shows it
      colorscale: scale, zmin: -0.5, zmax: colors.length - 0.5, showscale: false,
    }));
    if (anew) {
      this.hits = rows.flatMap((row) => row.events.filter(this.isHit)).sort((one, other) => one - other); // as they began
      this.at = -1;
      this.found.textContent = wanted ? `${this.hits.length.toLocaleString("en")} found in this step; Enter shows the next` : "";
    }
    const titled = this.shown.filter(({ on_gpu, level }) => on_gpu || !level);
    const height = Math.max(this.height(), 60);
    await Plotly.react(this.plot, data, {
      font: FONT, height: 80 + height, margin: { t: 30, r: 16, b: 50, l: 60 }, dragmode: "zoom",
      xaxis: { title: { text: "time since the step began (ms)" }, range: this.range },
      yaxis: {
        range: [height, 0], fixedrange: true, zeroline: false, showgrid: false, automargin: true,
        tickvals: titled.map((row) => row.middle), ticktext: titled.map((row) => (row.level ? "at the same time" : safe(row.lane))),
      },
      ...this.marks(),
    }, CONFIG);
    if (this.width() !== this.fitted) await Plotly.relayout(this.plot, this.marks());
    this.explain();
  }

  // Lines between lanes, the range that is summed up, the event that was chosen with a line from its launch; and names.
  marks() {
    const line = (x0, x1, y0, y1, color, more) => ({ type: "line", x0, x1, y0, y1, line: { width: 1, color }, ...more });
    const shapes = this.shown.filter(({ level }, i) => i && !level).map(({ y: [y] }) => line(0, 1, y, y, "#c9d0d8", { xref: "paper" }));
    const i = this.chosen, row = this.rowOf[i], call = row?.on_gpu ? this.above[i] : -1;
    if (this.measured) shapes.push(line(...this.measured, 0, 1, "#2b5d8f", { type: "rect", yref: "paper", fillcolor: "#2b5d8f2e" }));
    if (this.shown.includes(row)) shapes.push(line(this.start_ms[i], this.end(i), ...row.y, "#000", { type: "rect" }));
    if (this.shown.includes(this.rowOf[call])) shapes.push(line(this.start_ms[call], this.start_ms[i], this.rowOf[call].middle, row.middle, "#000"));
    return { shapes, annotations: this.labels() };
  }

  // What the range that is shown went to and, in tables, the one that was selected.
  explain() {
    const left = this.answer.left_out, [, most] = this.spent(this.range)[0] ?? [, []];
    const text = most.slice(0, 5).map(({ part, ms }) => `${part} ${duration(ms)}`).join(", ");
    this.note.textContent = (text && `Most of this range: ${text}.`)
      + (left ? ` ${left.toLocaleString("en")} shorter events are not shown; zoom in to see them.` : "");
    this.sums.replaceChildren(...(this.measured ? this.spent(this.measured).map((one) => this.table(...one)) : []));
  }

  // Of the GPU and of the host, part, class and ms within a range, most first; they add up to it.
  spent([first, last]) {
    return this.answer.sums.map(({ of, edges_ms: edges, part }) => {
      const sums = new Map(), within = (i) => Math.min(Math.max(edges[i], first), last);
      const add = (key, ms) => ms > 1e-9 && sums.set(key, (sums.get(key) ?? 0) + ms);
      part.forEach((key, i) => add(key, within(i + 1) - within(i)));
      add(-1, last - first - (within(part.length) - within(0)));
      const outside = { part: "outside of the steps", class: "" };
      const rows = [...sums].map(([key, ms]) => ({ ...(this.answer.parts[key] ?? outside), ms, share: ms / (last - first) }));
      return [of, rows.sort((one, other) => other.ms - one.ms)];
    });
  }

  table(of, rows) {
    const cell = (tag) => (textContent, i) => element(tag, { textContent, className: i < 2 ? "left wrap" : "" });
    const row = (tag, className, ...texts) => element("tr", { className }, ...texts.map(cell(tag)));
    const [first, last] = this.measured, title = `${of}, ${first.toFixed(4)} to ${last.toFixed(4)} ms`;
    const shown = [...rows, { part: "sum", class: "", ms: last - first, share: 1 }].map(({ part, class: kind, ms, share }, i) =>
      row("td", i < rows.length ? "" : "total", part, kind, ms.toFixed(4), `${(100 * share).toFixed(1)}%`));
    return element("table", {}, element("thead", {}, row("th", "", title, "class", "ms", "share")), element("tbody", {}, ...shown));
  }

  // Name, component and time of the event under the pointer.
  tell(i, { clientX, clientY }) {
    const lines = [this.partOf(i).part, this.time(i)].map((textContent) => element("div", { textContent }));
    this.tip.replaceChildren(element("b", { textContent: this.named(i).slice(0, 400) }), ...lines);
    Object.assign(this.tip.style, { left: `${Math.min(clientX + 14, window.innerWidth - 460)}px`, top: `${clientY + 18}px` });
    this.tip.hidden = false;
  }

  // All that is known of an event.
  describe(i) {
    this.chosen = i;
    const { part, class: kind } = this.partOf(i), { lane, where, on_gpu } = this.rowOf[i];
    const callers = [], { began_ms, inputs } = this.answer;
    for (let at = this.above[i]; at >= 0; at = this.above[at]) callers.push(at);
    const operator = [i, ...callers].find((at) => this.inputs[at] >= 0);
    const launch = on_gpu ? callers[0] : -1;
    const facts = {
      Event: this.named(i),
      Time: `${this.time(i)}, in ${this.step[i] === null ? "no step" : `step ${this.step[i]}`}`,
      On: lane,
      "Part and class": [part, kind].filter(Boolean).join("; "),
      Operator: operator >= 0 && `${this.named(operator)} ${inputs[this.inputs[operator]]}`,
      "Launched by": launch >= 0 && `${this.named(launch)}, ${this.time(launch)}; began ${duration(this.start_ms[i] - this.start_ms[launch])} later`,
      "Called by": callers.map((at) => this.named(at)).join(" ← "),
      "In Perfetto": began_ms !== null && `${(began_ms + this.start_ms[i]).toFixed(6)} ms, ${where}`,
    };
    const rows = Object.entries(facts).filter(([, text]) => text).map((texts) =>
      element("tr", {}, ...texts.map((textContent) => element("td", { textContent }))));
    this.about.replaceChildren(element("table", { className: "facts" }, element("tbody", {}, ...rows)));
    return Plotly.relayout(this.plot, this.marks());
  }

  // Names in the cells that have room for them.
  labels() {
    const [first, last] = this.range;
    this.fitted = this.width();
    const pxPerMs = this.fitted / (last - first), found = [];
    for (const { events, middle: y } of this.shown) for (const i of events) {
      const [from, to] = [Math.max(this.start_ms[i], first), Math.min(this.end(i), last)];
      const letters = Math.floor(((to - from) * pxPerMs - 4) / 6);
      if (letters < 5) continue;
      const name = this.named(i);
      const text = safe(name.length > letters ? name.slice(0, letters - 1) + "…" : name);
      const color = this.isHit(i) ? this.partOf(i).ink : "#000";
      found.push({ x: (from + to) / 2, y, text, showarrow: false, font: { size: 10, color }, width: to - from });
    }
    return found.sort((one, other) => other.width - one.width).slice(0, 150).map(({ width, ...label }) => label);
  }

  zoomed(change) {
    const { step, left_out } = this.answer;
    if (change.autosize) return this.color(false); // another width: other names have room
    if (change["xaxis.autorange"]) return this.show({ step });
    if (change["xaxis.range[0]"] === undefined) return;
    this.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    return left_out || this.partial ? this.show({ step, window: this.range }) : this.color(false);
  }

  press({ key, target, ctrlKey, metaKey, altKey }) {
    const [zoom, pan] = KEYS[key.toLowerCase()] ?? [];
    const { top, bottom } = this.plot.getBoundingClientRect();
    if (!zoom || ctrlKey || metaKey || altKey || target.matches("input, select") || bottom <= 0 || top > window.innerHeight) return;
    const [first, last] = this.range, width = last - first, middle = (first + last) / 2 + pan * width;
    this.zoom(middle - zoom * width / 2, middle + zoom * width / 2);
  }

  // Drag with Shift: a range to sum up, which stays until the next one.
  measure(down) {
    this.plot.focus({ preventScroll: true }); // for the keys
    if (!down.shiftKey) return;
    down.stopPropagation();
    down.preventDefault();
    const { left, width } = this.area(), [first, last] = this.range;
    const at = ({ clientX }) => first + (last - first) * Math.min(Math.max((clientX - left) / width, 0), 1);
    const drag = (event) => {
      const ends = [at(down), at(event)].sort((one, other) => one - other);
      this.measured = ends[1] > ends[0] ? ends : null;
      Plotly.relayout(this.plot, this.marks());
      this.explain();
    };
    window.addEventListener("mousemove", drag);
    window.addEventListener("mouseup", (up) => (drag(up), window.removeEventListener("mousemove", drag)), { once: true });
  }

  next() {
    if (!this.hits.length) return;
    this.at = (this.at + 1) % this.hits.length;
    const i = this.hits[this.at], start = this.start_ms[i], ms = this.ms[i];
    this.describe(i);
    return this.zoom(start - 4 * ms, start + 5 * ms);
  }

  // The longest event with this in its name, its part, its class or its inputs; of a GPU, if one has.
  async find(text) {
    await this.drawn;
    this.search.value = text;
    await this.color(true);
    const rank = (i) => this.ms[i] + 1e12 * this.rowOf[i].on_gpu;
    this.at = this.hits.indexOf(this.hits.reduce((one, other) => (rank(other) > rank(one) ? other : one), this.hits[0])) - 1;
    this.plot.scrollIntoView({ block: "center" });
    return this.next();
  }
}
