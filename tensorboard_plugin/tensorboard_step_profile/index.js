// The tab: which run is shown, which trace of it, and beside which other one.  The page itself is
// HTML of the workshop's templates, which escape what stands in a trace.  Everything comes from
// this plugin's own routes.

import { bringToLife } from "./page.js";
import { element } from "./timeline.js";

let plotly; // loads with the first chart
const loadPlotly = () => (plotly ??= load("./plotly.min.js"));

function load(src) {
  const help = `${src} cannot be loaded: pip install plotly, and start TensorBoard again`;
  return new Promise((done, fail) => {
    const onerror = () => fail(new Error(help));
    document.head.append(element("script", { src, onload: done, onerror }));
  });
}

async function ask(route, parameters = {}) {
  const answer = await (await fetch(`./${route}?${new URLSearchParams(parameters)}`)).json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}

class Tab {
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
    const choice = Object.entries(labels).map(([name, box]) =>
      element("label", {}, `${name} `, box),
    );
    document.body.append(
      element("main", {}, element("div", { className: "choice" }, ...choice), this.content),
    );
  }

  async start() {
    this.say("Looking for runs …");
    const { runs, logdir } = await ask("runs");
    if (!runs.length) return this.say(`No run and no trace in ${logdir} or below it.`);
    const options = () => runs.map(({ run, name }) => new Option(name, run));
    this.run.append(...options());
    this.other.append(new Option("–", ""), ...options());
    await this.show({});
  }

  say(text) {
    this.content.replaceChildren(element("p", { className: "soft", textContent: text }));
  }

  // ranks: read all traces of the run.
  async show({ ranks = false }) {
    const [run, trace, other] = [this.run.value, this.trace.value, this.other.value];
    const shown = { waits: true };
    this.asked = shown; // an answer that comes after the next question is not shown
    this.say("Reading …");
    this.tellProgress(shown);
    const page = ranks ? { run, trace, ranks } : { run, trace };
    try {
      const question = other ? ask("compare", { run, trace, other }) : ask("page", page);
      const answer = await question.finally(() => (shown.waits = false));
      if (shown === this.asked) this.fill(run, answer);
    } catch (error) {
      if (shown === this.asked) this.say(error.message);
    }
  }

  fill(run, answer) {
    const page = element("div", { innerHTML: answer.html }); // of a template with autoescape
    const step = async (parameters) =>
      answer.step ?? ask("timeline", { run, trace: answer.trace, ...parameters });
    bringToLife(page, answer.charts, step, loadPlotly);
    this.content.replaceChildren(page);
    if (answer.traces) {
      const option = (name) => new Option(name, name, false, name === answer.trace);
      this.trace.replaceChildren(...answer.traces.map(option));
    }
    if (answer.ranks_to_read) page.querySelector("header").after(this.offer(answer.ranks_to_read));
    for (const reason of answer.not_read ?? []) {
      page.prepend(element("p", { className: "bad", textContent: `Not read: ${reason}` }));
    }
  }

  // How far reading is, until the answer to this question comes, or another question is asked.
  async tellProgress(question) {
    while (question.waits && question === this.asked) {
      const { file, share } = await ask("progress").catch(() => ({}));
      if (file && question.waits && question === this.asked) {
        this.say(`Reading ${file}: ${Math.round(100 * share)}% …`);
      }
      await new Promise((done) => setTimeout(done, 500));
    }
  }

  offer(count) {
    const textContent = `Read all ${count} traces of this run and compare the ranks`;
    const onclick = () => this.show({ ranks: true });
    const button = element("button", { id: "read-ranks", textContent, onclick });
    return element("p", {}, button);
  }
}

export async function render() {
  document.head.append(element("link", { rel: "stylesheet", href: "./page.css" }));
  const tab = new Tab();
  await tab.start().catch((error) => tab.say(error.message));
}
