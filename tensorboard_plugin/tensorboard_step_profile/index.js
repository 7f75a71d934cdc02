// The page of the tab.  Sections are HTML of the workshop's templates, which escape what stands in a trace; charts are
// figures for plotly.  Everything comes from this plugin's own routes.

const ROW_PX = 17; // of the timeline
const BUTTONS = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]]; // none that leads elsewhere
const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: BUTTONS };
const FONT = { family: 'system-ui, "Segoe UI", Roboto, sans-serif', size: 12, color: "#1c2430" };
const STYLE = `
  body { overflow-y: scroll; }
  .bar { display: flex; flex-wrap: wrap; gap: 10px 18px; align-items: center; }
  .bar select, .bar input { max-width: 340px; font: inherit; padding: 2px 4px; }
  .chart { width: 100%; }
  .tip { position: fixed; z-index: 9; max-width: 440px; overflow-wrap: anywhere; pointer-events: none; font-size: 12px;
    padding: 5px 8px; background: #fff; border: 1px solid #5b6675; border-radius: 4px; }
  th { cursor: pointer; user-select: none; }
  th[data-sorted="down"]::after { content: " ▾"; }
  th[data-sorted="up"]::after { content: " ▴"; }
`;

const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
// plotly takes <b>, <a> and others in any text for markup
const safe = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const duration = (ms) => (ms >= 1 ? `${ms.toFixed(3)} ms` : `${(1e3 * ms).toFixed(2)} us`);

const load = (src) =>
  new Promise((done, fail) => {
    const lost = () => fail(new Error(`${src} cannot be loaded: pip install plotly, and start TensorBoard again`));
    document.head.append(element("script", { src, onload: done, onerror: lost }));
  });

async function ask(route, parameters = {}) {
  const answer = await (await fetch(`./${route}?${new URLSearchParams(parameters)}`)).json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

function draw(place, { data, layout }) {
  const margin = { t: 54, r: 16, b: 44, l: 60 };
  const legend = { orientation: "h", y: 1, yanchor: "bottom", traceorder: "normal" };
  return Plotly.react(place, data, { font: FONT, margin, legend, ...layout }, CONFIG);
}

// ---- The timeline ---------------------------------------------------------------------------------------------------

// One step, a row for each level of each lane.  Each row is a heatmap, which plotly draws on a canvas: thousands of
// events stay quick.  Where there are too many, the shortest come once the window is small enough.
class Timeline {
  constructor(place, run, trace) {
    this.names = { run, trace };
    this.steps = element("select", { className: "steps", onchange: () => this.show({ step: this.steps.value }) });
    const placeholder = "operator, kernel or component";
    this.search = element("input", { type: "search", className: "search", placeholder, size: placeholder.length });
    this.search.oninput = () => this.color(true);
    this.search.onkeydown = (event) => event.key === "Enter" && this.next();
    this.found = element("span", { className: "soft found" });
    this.note = element("p", { className: "soft" });
    this.plot = element("div");
    this.tip = element("div", { className: "tip", hidden: true });
    const labels = [element("label", {}, "Step ", this.steps), element("label", {}, "Find ", this.search)];
    place.append(element("div", { className: "bar" }, ...labels, this.found), this.plot, this.tip, this.note);
    this.note.textContent = "Reading the trace …";
    this.show({});
  }

  // window: [first, last] ms of the step; without it, the whole step.
  async show(parameters) {
    const asked = (this.asked = {}); // an answer that comes after the next question is not shown
    try {
      const events = await ask("timeline", { ...this.names, ...parameters });
      if (asked === this.asked) await this.draw(events, !parameters.window);
    } catch (error) {
      this.note.textContent = error.message;
    }
  }

  async draw(events, whole) {
    this.events = events;
    const { steps, step, window_ms } = events;
    if (whole) this.range = window_ms;
    this.partial = !whole; // zooming out needs other events
    this.steps.replaceChildren(...steps.map((number) => new Option(number, number, false, number === step)));
    this.rows = this.events.rows.map((row, index) => this.heatmap(row, index));
    await this.color(whole);
    if (this.listening) return;
    this.listening = true;
    this.plot.on("plotly_relayout", (change) => this.zoomed(change));
    this.plot.on("plotly_hover", (pointed) => this.tell(pointed));
    this.plot.on("plotly_unhover", () => (this.tip.hidden = true));
  }

  // Cells lie between neighboring edges: an event, the gap after it, the next event, and so on.
  heatmap({ lane, start_ms, ms, name, part }, index) {
    const x = [], cells = [];
    start_ms.forEach((start, i) => {
      const edge = Math.max(start, x.length ? x[x.length - 1] : start);
      x.push(edge, Math.max(edge, start + ms[i]));
      cells.push(i, null);
    });
    cells.pop();
    return { lane, x, cells, start_ms, ms, name, part, y: [index - 0.46, index + 0.46] };
  }

  // Colors are numbers of parts; what a search does not find is gray.
  // anew: the search begins from the first that it finds.
  async color(anew) {
    const { names, parts } = this.events;
    const wanted = this.search.value.toLowerCase();
    const hit = (values) => values.map((text) => text.toLowerCase().includes(wanted));
    const [nameHit, partHit] = [hit(names), hit(parts.map((part) => part.name))];
    this.isHit = (row, i) => nameHit[row.name[i]] || partHit[row.part[i]]; // an empty search finds everything
    const colors = [...parts.map((part) => part.color), "#e3e7eb"];
    const scale = colors.flatMap((color, i) => [[i / colors.length, color], [(i + 1) / colors.length, color]]);
    const hits = [];
    const data = this.rows.map((row) => ({
      type: "heatmap",
      x: row.x,
      y: row.y,
      z: [row.cells.map((i) => {
        if (i === null) return null;
        if (!this.isHit(row, i)) return parts.length;
        hits.push([row.start_ms[i], row.ms[i]]);
        return row.part[i];
      })],
      hoverinfo: "none", // tell() shows it
      hoverongaps: false,
      colorscale: scale,
      zmin: -0.5,
      zmax: colors.length - 0.5,
      showscale: false,
    }));
    if (anew) {
      const count = hits.length.toLocaleString("en");
      this.hits = hits.sort((one, other) => one[0] - other[0]);
      this.at = -1;
      this.found.textContent = wanted ? `${count} found; Enter shows the next` : "";
    }
    const lanes = this.rows.map((row, index) => [index, row.lane]).filter(([, lane]) => lane);
    await Plotly.react(this.plot, data, {
      font: FONT,
      height: 110 + ROW_PX * Math.max(this.rows.length, 4),
      margin: { t: 30, r: 16, b: 44, l: 60 },
      dragmode: "zoom",
      xaxis: { title: { text: "time since the step began (ms)" }, range: this.range },
      yaxis: {
        range: [this.rows.length - 0.5, -0.5], fixedrange: true, zeroline: false, showgrid: false, automargin: true,
        tickvals: lanes.map(([index]) => index), ticktext: lanes.map(([, lane]) => safe(lane)),
      },
      shapes: lanes.slice(1).map(([index]) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: index - 0.5, y1: index - 0.5, line: { width: 1, color: "#c9d0d8" },
      })),
      annotations: this.labels(),
    }, CONFIG);
    if (this.width() !== this.fitted) await Plotly.relayout(this.plot, { annotations: this.labels() });
    this.explain();
  }

  explain() {
    const { left_out: left, spent } = this.events;
    const most = spent.map(({ name, ms }) => `${name} ${duration(ms)}`).join(", ") || "no step";
    this.note.textContent = `Most of this range: ${most}. `
      + "Drag to zoom, drag with Shift to move, double-click to see the whole step."
      + (left ? ` ${left.toLocaleString("en")} shorter events are not shown; zoom in to see them.` : "");
  }

  // Name, component and time of the event under the pointer.
  tell({ points: [{ curveNumber, pointNumber }], event }) {
    const { names, parts } = this.events;
    const row = this.rows[curveNumber];
    const i = row.cells[pointNumber[1]];
    const time = `${duration(row.ms[i])} from ${row.start_ms[i].toFixed(4)} ms on`;
    const lines = [parts[row.part[i]].name, time].map((textContent) => element("div", { textContent }));
    this.tip.replaceChildren(element("b", { textContent: names[row.name[i]] }), ...lines);
    this.tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 460)}px`;
    this.tip.style.top = `${event.clientY + 18}px`;
    this.tip.hidden = false;
  }

  // Of the cells' area, which plotly sets beside the names of the lanes when it draws; until then about that.
  width() {
    return this.plot.querySelector(".nsewdrag")?.getBoundingClientRect().width ?? Math.max(this.plot.clientWidth - 190, 100);
  }

  // Names in the cells that have room for them.
  labels() {
    const [first, last] = this.range;
    this.fitted = this.width();
    const pxPerMs = this.fitted / (last - first);
    const { names, parts } = this.events;
    const found = [];
    this.rows.forEach((row, y) => row.start_ms.forEach((start, i) => {
      const [from, to] = [Math.max(start, first), Math.min(start + row.ms[i], last)];
      const letters = Math.floor(((to - from) * pxPerMs - 4) / 6);
      if (letters < 5) return;
      const name = names[row.name[i]];
      const text = safe(name.length > letters ? name.slice(0, letters - 1) + "…" : name);
      const color = this.isHit(row, i) && dark(parts[row.part[i]].color) ? "#fff" : "#000";
      found.push({ x: (from + to) / 2, y, text, showarrow: false, font: { size: 10, color }, width: to - from });
    }));
    return found.sort((one, other) => other.width - one.width).slice(0, 150).map(({ width, ...label }) => label);
  }

  async zoomed(change) {
    const { step, left_out } = this.events;
    if (change.autosize) return this.color(false); // another width: other names have room
    if (change["xaxis.autorange"]) return this.show({ step });
    if (change["xaxis.range[0]"] === undefined) return;
    this.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const parameters = { step, window: this.range };
    if (left_out || this.partial) return this.show(parameters);
    await this.color(false);
    const asked = (this.asked = {});
    const { spent } = await ask("timeline", { ...this.names, ...parameters });
    if (asked !== this.asked) return;
    this.events.spent = spent;
    this.explain();
  }

  next() {
    if (!this.hits.length) return;
    this.at = (this.at + 1) % this.hits.length;
    const [start, ms] = this.hits[this.at];
    Plotly.relayout(this.plot, { "xaxis.range[0]": start - 4 * ms, "xaxis.range[1]": start + 5 * ms });
  }
}

function dark(color) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue < 140;
}

// ---- Tables ---------------------------------------------------------------------------------------------------------

// A click on a title sorts by that column, largest first; a second one turns the order around.  Sums stay below.
function sort(title) {
  const column = [...title.parentNode.children].indexOf(title);
  const down = title.dataset.sorted !== "down";
  for (const other of title.parentNode.children) delete other.dataset.sorted;
  title.dataset.sorted = down ? "down" : "up";
  const body = title.closest("table").tBodies[0];
  const key = (row) => {
    const text = row.cells[column].textContent;
    const number = Number(text.replace(/[,%]/g, ""));
    return Number.isNaN(number) ? (text === "-" ? -Infinity : text.toLowerCase()) : number;
  };
  const order = (one, other) => (one < other ? 1 : one > other ? -1 : 0) * (down ? 1 : -1);
  const rows = [...body.rows];
  const totals = rows.filter((row) => row.className === "total");
  const sorted = rows.filter((row) => row.className !== "total").sort((one, other) => order(key(one), key(other)));
  body.append(...sorted, ...totals);
}

// ---- The page -------------------------------------------------------------------------------------------------------

class Page {
  constructor() {
    this.run = element("select", { id: "run" });
    this.run.onchange = () => {
      this.trace.replaceChildren(); // those of the run before
      this.show({});
    };
    this.trace = element("select", { id: "trace", onchange: () => this.show({}) });
    this.other = element("select", { id: "other", onchange: () => this.show({}) });
    this.content = element("div", { id: "content" });
    const labels = { Run: this.run, Trace: this.trace, "Compare with": this.other };
    const bar = Object.entries(labels).map(([name, box]) => element("label", {}, `${name} `, box));
    document.body.append(element("main", {}, element("div", { className: "bar" }, ...bar), this.content));
    this.content.onclick = ({ target }) => target.tagName === "TH" && sort(target);
  }

  async start() {
    this.say("Looking for runs …");
    const [{ runs, logdir }] = await Promise.all([ask("runs"), load("./plotly.min.js")]);
    if (!runs.length) return this.say(`No run and no trace in ${logdir} or below it.`);
    this.run.append(...runs.map((run) => new Option(run, run)));
    this.other.append(new Option("–", ""), ...runs.map((run) => new Option(run, run)));
    await this.show({});
  }

  say(text) {
    this.content.replaceChildren(element("p", { className: "soft", textContent: text }));
  }

  // ranks: read all traces of the run.
  async show({ ranks = false }) {
    const [run, trace, other] = [this.run.value, this.trace.value, this.other.value];
    const shown = (this.asked = { waits: true }); // an answer that comes after the next question is not shown
    this.say("Reading …");
    this.tellProgress(shown);
    try {
      const answer = await (other
        ? ask("compare", { run, trace, other })
        : ask("page", { run, trace, ...(ranks ? { ranks } : {}) })
      ).finally(() => (shown.waits = false));
      if (shown !== this.asked) return;
      this.content.innerHTML = answer.html; // of a template with autoescape
      if (answer.traces) this.trace.replaceChildren(...answer.traces.map((name) => new Option(name, name, false, name === answer.trace)));
      if (answer.ranks_to_read) this.offer(answer.ranks_to_read);
      for (const reason of answer.not_read ?? []) this.note(element("p", { className: "bad", textContent: `Not read: ${reason}` }));
      for (const place of this.content.querySelectorAll(".chart")) {
        const name = place.dataset.chart;
        if (name === "step_timeline") new Timeline(place, run, answer.trace);
        else draw(place, answer.charts[name]);
      }
    } catch (error) {
      if (shown === this.asked) this.say(error.message);
    }
  }

  // How far reading is, until the answer to this question comes, or another question is asked.
  async tellProgress(question) {
    while (question.waits && question === this.asked) {
      const { file, share } = await ask("progress").catch(() => ({}));
      if (file && question.waits && question === this.asked) this.say(`Reading ${file}: ${Math.round(100 * share)}% …`);
      await new Promise((done) => setTimeout(done, 500));
    }
  }

  offer(count) {
    const text = `Read all ${count} traces of this run and compare the ranks`;
    const button = element("button", { id: "read-ranks", textContent: text });
    button.onclick = () => this.show({ ranks: true });
    this.note(element("p", {}, button));
  }

  note(line) {
    this.content.querySelector("nav").after(line);
  }
}

export async function render() {
  document.head.append(element("link", { rel: "stylesheet", href: "./page.css" }), element("style", { textContent: STYLE }));
  const page = new Page();
  await page.start().catch((error) => page.say(error.message));
}
