// What a page does, in TensorBoard and as report.html: tables sort and unfold, sections draw their
// charts when they open.

import { CONFIG, FONT, Timeline } from "./timeline.js";

const TIMELINE = '[data-chart="step_timeline"]';

// charts: figures for plotly, by name.  ask: as Timeline has it.  loadPlotly: a promise that
// window.Plotly is there.
export function bringToLife(root, charts, ask, loadPlotly) {
  const drawn = new Map(); // promises, by place
  const draw = async (place) => {
    try {
      await loadPlotly();
    } catch (error) {
      place.textContent = error.message;
      return;
    }
    if (place.matches(TIMELINE)) return new Timeline(place, ask);
    return chart(place, charts[place.dataset.chart]);
  };
  const drawOnce = (place) => {
    if (!drawn.has(place)) drawn.set(place, draw(place));
    return drawn.get(place);
  };
  const opened = ({ target: section }) => {
    if (!section.open) return;
    section.querySelectorAll(".chart").forEach(drawOnce);
    for (const plot of section.querySelectorAll(".js-plotly-plot")) {
      Plotly.Plots.resize(plot); // the window may be another
    }
  };
  root.addEventListener("toggle", opened, true);
  for (const target of root.querySelectorAll("details[open]")) opened({ target }); // meanwhile
  root.addEventListener("click", (event) => {
    const { target } = event;
    if (target.tagName === "TH") sort(target);
    else if (target.className === "more") unfold(target);
    else if (target.className === "copy") copy(target.previousElementSibling);
    else if (target.matches('a[href^="#"]')) {
      show(root.querySelector(target.getAttribute("href")), event);
    } else if (target.closest("td.find")) find(target.closest("td.find"), event);
  });
  const find = (cell, event) => {
    const place = root.querySelector(TIMELINE);
    // A name that is selected is to be copied.
    if (!place || window.getSelection().toString()) return;
    show(place, event);
    drawOnce(place).then((timeline) => timeline?.find(cell.title || cell.textContent));
  };
  tellWhatIsWider(root);
}

// Marks what has more to the right than its place shows.
function tellWhatIsWider(root) {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      target.classList.toggle("wider", target.scrollWidth > target.clientWidth + 1);
    }
  });
  for (const box of root.querySelectorAll(".scroll")) observer.observe(box);
}

function chart(place, { data, layout }) {
  const margin = { t: 30, r: 16, b: 44, l: 60 };
  return Plotly.react(place, data, { font: FONT, margin, ...layout }, CONFIG);
}

// A click on a title sorts by that column, largest first; a second one turns the order around.
// Sums stay below.
function sort(title) {
  const column = [...title.parentNode.children].indexOf(title);
  const down = title.dataset.sorted !== "down";
  for (const other of title.parentNode.children) delete other.dataset.sorted;
  title.dataset.sorted = down ? "down" : "up";
  const body = title.closest("table").tBodies[0];
  const key = (row) => {
    const text = row.cells[column].textContent;
    const number = Number(text.replace(/[,%x]/g, ""));
    return Number.isNaN(number) ? (text === "-" ? -Infinity : text.toLowerCase()) : number;
  };
  const order = (one, other) => (one < other ? 1 : one > other ? -1 : 0) * (down ? 1 : -1);
  const rows = [...body.rows];
  const totals = rows.filter((row) => row.className === "total");
  const sorted = rows
    .filter((row) => row.className !== "total")
    .sort((one, other) => order(key(one), key(other)));
  body.append(...sorted, ...totals);
}

function unfold(button) {
  button.previousElementSibling.classList.remove("long");
  button.remove();
}

function copy(code) {
  window.getSelection().selectAllChildren(code);
  document.execCommand("copy"); // works without https, as on a node behind a tunnel
}

function show(place, event) {
  if (!place) return;
  event.preventDefault();
  for (
    let section = place.closest("details");
    section;
    section = section.parentNode.closest("details")
  )
    section.open = true;
  place.scrollIntoView();
}
