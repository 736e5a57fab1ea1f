// Error against slots and against time, by plotly. The same numbers are in the table.
const charts = [
  { id: "pareto", x: (row) => row.slots, name: "slots per query" },
  { id: "time", x: (row) => row.ms, name: "ms, one layer's attention" },
];
const probe = document.body.appendChild(make("i", { hidden: true }));
function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
function plainTicks(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const steps = [];
  for (let e = -4; e < 7; e++) for (const m of [1, 2, 5]) steps.push(Number(`${m}e${e}`));
  const shown = steps.filter((step) => step >= low / 1.2 && step <= high * 1.2);
  return { tickvals: shown, ticktext: shown.map((step) => step.toLocaleString("en", { maximumFractionDigits: 4 })) };
}
function drawChart({ id, x, name }) {
  const shown = rows.map((row, i) => ({ ...row, i })).filter((row) => visible(row) && row.error > 1e-4);
  const traces = methods.filter((method) => shown.some((row) => row.name === method)).map((method) => {
    const look = data.looks[method];
    const own = shown.filter((row) => row.name === method).sort((a, b) => a.slots - b.slots);
    const paint = look.color === "#000000" ? css("--text") : look.color;
    return {
      type: "scatter", mode: "lines+markers", name: method, x: own.map(x), y: own.map((row) => row.error),
      line: { color: paint, width: look.width, dash: look.dash ? "dash" : "solid" },
      marker: { symbol: look.symbol, size: look.width > 3 ? 11 : 8, color: paint, line: { color: paint, width: look.symbol.endsWith("open") ? 1.5 : 0 } },
      customdata: own.map((row) => row.i),
      hovertemplate: own.map((row) => `<b>${label(row)}</b><br>error ${row.error.toFixed(3)}, p90 ${row.p90.toFixed(3)}<br>`
        + `${row.slots.toFixed(1)} slots, ${row.ms.toFixed(1)} ms (${(row.exact_ms / row.ms).toFixed(2)}× exact)`
        + (row.cosine === null ? "" : `<br>cosine ${row.cosine.toFixed(4)}`) + "<extra></extra>"),
    };
  });
  const exact = rows.find((row) => row.kind === "exact");
  const lines = id === "time" && exact ? [{ type: "line", x0: exact.ms, x1: exact.ms, y0: 0, y1: 1, yref: "paper", line: { color: css("--text"), width: 1.5, dash: "dot" } }] : [];
  const axis = (values, title) => ({ type: "log", title: { text: title, standoff: 8 }, gridcolor: css("--line"), zeroline: false, tickangle: 0, ...plainTicks(values) });
  const xs = shown.map(x).concat(lines.length ? [exact.ms] : []);
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--text"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 52, r: 12, t: 10, b: 46 }, showlegend: false, hovermode: "closest", shapes: lines,
    xaxis: axis(xs, name), yaxis: axis(shown.map((row) => row.error), "mean relative output error"),
    hoverlabel: { bgcolor: css("--card"), font: { color: css("--text") } },
  };
  if (id === "pareto") Object.assign(layout.xaxis, { tickvals: budgets, ticktext: budgets.map(String) });
  const node = $(id);
  Plotly.react(node, traces, layout, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] });
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", `${name} against mean relative output error, ${shown.length} rows of ${traces.length} methods; every figure is in the table`);
  if (!node.dataset.heard) {
    node.dataset.heard = "yes";
    node.on("plotly_click", ({ points }) => change({ plans: [points[0].customdata, state.plans[1]] }));
  }
}
const drawCharts = () => charts.forEach(drawChart);
listeners.push((what) => { if (["filters", "dark"].some((name) => what.includes(name))) drawCharts(); });
drawCharts();
