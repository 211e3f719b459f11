"use strict";
// What pages can do beyond being read: refresh, themes, charts, keys, selection. All of them work without it.

const HISTORY_MS = 10_000;
const THEMES = ["", "dark", "light"];
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function reveal() {
  for (const element of document.querySelectorAll(".controls, .keys, #select-all")) element.hidden = false;
}
reveal();
// The server sends them hidden each time.
document.body.addEventListener("htmx:after:swap", reveal);

// --- refresh: not while nobody looks, nor while somebody selects

let timer = 0;
const busy = () => document.hidden || document.querySelector("#selection input:checked, details[open] pre:focus");
function refresh() {
  if (!busy()) document.body.dispatchEvent(new CustomEvent("refresh"));
}
// Somebody may have selected messages while the request was under way.
document.body.addEventListener("htmx:before:swap", (event) => {
  if (busy()) event.preventDefault();
});
// What somebody has unfolded stays open.
htmx.config.morphIgnore.push("open");
function schedule(seconds) {
  clearInterval(timer);
  timer = seconds ? setInterval(refresh, seconds * 1000) : 0;
}
const choice = byId("refresh");
choice.value = localStorage.getItem("marq-refresh") ?? "5";
choice.addEventListener("change", () => {
  localStorage.setItem("marq-refresh", choice.value);
  schedule(Number(choice.value));
});
// What asks for a decision stays as it is, and what is found by reading logs is not read every few seconds.
const costly = ["/dead-letters", "/message"].includes(location.pathname) || /state=(waiting|dead)/.test(location.search);
if (costly || !byId("live").children.length) choice.value = "0";
schedule(Number(choice.value));

// --- themes

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(localStorage.getItem("marq-theme") ?? "") + 1) % THEMES.length];
  localStorage.setItem("marq-theme", next);
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  drawAll();
});

// --- keys

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  if (event.key === "/") {
    document.querySelector("input[type=search]")?.focus();
    event.preventDefault();
  } else if (event.key === "r") {
    refresh();
    loadAll();
  } else if (event.key === "t") {
    byId("theme").click();
  }
});

// --- selection

document.addEventListener("click", (event) => {
  if (event.target.id !== "select-all") return;
  const boxes = [...document.querySelectorAll("#selection input[type=checkbox]")];
  const all = boxes.every((box) => box.checked);
  for (const box of boxes) box.checked = !all;
});

// --- charts

const charts = [...document.querySelectorAll(".chart")].map((figure) => ({ figure, plot: null, data: null }));

// A name is that of a series, or a sum: a+b. What is not known of one part is not known of the sum.
function values(data, name) {
  const parts = name.split("+").map((part) => data.series[part] ?? []);
  return data.times.map((_, index) => {
    const found = parts.map((part) => part[index] ?? null);
    return found.includes(null) ? null : found.reduce((sum, value) => sum + value, 0);
  });
}
// Lines connect neighbours. A value between two gaps, as quiet queues have, gets a dot.
const alone = (column) =>
  [...column.keys()].filter((index) => column[index] !== null && (column[index - 1] ?? column[index + 1] ?? null) === null);
const written = (value, unit) =>
  value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }) + unit;

function draw(chart) {
  if (!chart.data) return;
  const place = chart.figure.querySelector(".plot");
  const entries = [...chart.figure.querySelectorAll(".legend li")];
  const columns = entries.map((entry) => values(chart.data, entry.dataset.series));
  // The legend shows the values at the cursor, or else the last ones.
  const show = (index) => {
    entries.forEach((entry, number) => {
      const last = columns[number].findLast((value) => value !== null) ?? null;
      entry.querySelector("b").textContent = written(index === null ? last : columns[number][index], chart.figure.dataset.unit);
    });
  };
  chart.plot?.destroy();
  const days = chart.data.times.at(-1) - chart.data.times[0] > 2 * 86400;
  const axis = { stroke: colour("--pico-color"), grid: { stroke: colour("--pico-muted-border-color"), width: 1 } };
  const options = {
    width: Math.max(place.clientWidth, 200),
    height: 190,
    legend: { show: false },
    hooks: { setCursor: [(plot) => show(plot.cursor.idx ?? null)] },
    scales: { y: { range: (plot, least, most) => [0, Math.max(most ?? 0, 1) * 1.05] } },
    axes: [
      { ...axis, values: (plot, times) => times.map((seconds) => new Date(seconds * 1000).toISOString().slice(...(days ? [5, 10] : [11, 16]))) },
      { ...axis, size: 60 },
    ],
    series: [
      {},
      ...entries.map((entry, number) => ({
        stroke: getComputedStyle(entry).stroke,
        points: { show: false, size: 6, fill: getComputedStyle(entry).stroke, filter: () => alone(columns[number]) },
        width: 2,
        dash: (entry.querySelector("line").getAttribute("stroke-dasharray") || "").split(" ").filter(Boolean).map(Number),
      })),
    ],
  };
  chart.plot = new uPlot(options, [chart.data.times, ...columns], place);
  show(null);
}
function drawAll() {
  charts.forEach(draw);
}
async function loadAll() {
  const found = new Map();
  for (const address of new Set(charts.map((chart) => chart.figure.dataset.history))) {
    try {
      const answer = await fetch(address);
      if (answer.ok) found.set(address, await answer.json());
    } catch {
      // The worker is away: what was drawn stays.
    }
  }
  const problem = document.querySelector("#history .problem");
  for (const { problem: text } of problem ? found.values() : []) {
    problem.textContent = text ?? "";
    problem.hidden = !text;
  }
  for (const chart of charts) {
    chart.data = found.get(chart.figure.dataset.history) ?? chart.data;
    draw(chart);
    chart.figure.dataset.drawn = chart.plot ? "yes" : "no";
  }
}
if (charts.length) {
  loadAll();
  setInterval(() => document.hidden || loadAll(), HISTORY_MS);
  window.addEventListener("resize", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}
