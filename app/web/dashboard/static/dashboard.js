"use strict";
// What pages can do beyond being read: refresh, themes, charts, keys, selection. All of them work without it.

const HISTORY_MS = 10_000;
const LABELS = {
  in_flight: "in flight",
  waiting_for_delivery: "delayed",
  waiting_for_redelivery: "to redeliver",
  acquired_per_second: "delivered",
  acked_per_second: "acknowledged",
  redelivered_per_second: "redelivered",
  dead_per_second: "dead",
};
const THEMES = ["", "dark", "light"];
const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

for (const each of document.querySelectorAll(".controls, .keys, #select-all")) each.hidden = false;

// --- refresh: not while nobody looks, nor while somebody selects

let timer = 0;
function refresh() {
  const busy = document.hidden || document.querySelector("#selection input:checked, details[open] pre:focus");
  if (!busy) document.body.dispatchEvent(new CustomEvent("refresh"));
}
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
const costly = ["/dead", "/message"].includes(location.pathname) || /state=(waiting|dead)/.test(location.search);
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

function draw(chart) {
  if (!chart.data) return;
  const place = chart.figure.querySelector(".plot");
  const names = chart.figure.dataset.series.split(" ");
  chart.plot?.destroy();
  const axis = { stroke: colour("--pico-color"), grid: { stroke: colour("--pico-muted-border-color"), width: 1 } };
  const options = {
    width: Math.max(place.clientWidth, 200),
    height: 190,
    scales: { y: { range: (plot, least, most) => [0, Math.max(most ?? 0, 1) * 1.05] } },
    axes: [
      { ...axis, values: (plot, times) => times.map((seconds) => new Date(seconds * 1000).toISOString().slice(11, 16)) },
      { ...axis, size: 60 },
    ],
    series: [
      { label: "time", value: (plot, seconds) => (seconds === null ? "–" : new Date(seconds * 1000).toISOString().slice(11, 19)) },
      ...names.map((name, number) => ({
        label: LABELS[name] ?? name,
        stroke: colour(`--marq-chart-${number + 1}`),
        width: 2,
        dash: [[], [6, 3], [2, 3], [8, 3, 2, 3]][number],
        value: (plot, value) => (value === null ? "–" : value.toFixed(value < 10 ? 1 : 0) + chart.figure.dataset.unit),
      })),
    ],
  };
  chart.plot = new uPlot(options, [chart.data.times, ...names.map((name) => chart.data.series[name])], place);
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
