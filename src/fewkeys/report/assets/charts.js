// Two pictures by plotly: time, and error against slots. The same numbers are in the table.
const probe = document.body.appendChild(make("i", { hidden: true }));
function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}
const paint = (name) => (data.looks[name].color === "#000000" ? css("--text") : data.looks[name].color);
function plainTicks(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const every = (factors) => {
    const steps = [];
    for (let e = -4; e < 7; e++) for (const m of factors) steps.push(Number(`${m}e${e}`));
    return steps.filter((step) => step >= low / 1.2 && step <= high * 1.2);
  };
  const shown = every([1, 2, 5]).length > 7 ? every([1]) : every([1, 2, 5]);
  return { tickvals: shown, ticktext: shown.map((step) => step.toLocaleString("en", { maximumFractionDigits: 4 })) };
}
const axis = (values, title) => ({ type: "log", title: { text: title, standoff: 8 }, gridcolor: css("--line"), zeroline: false, tickangle: 0, ...plainTicks(values) });
const marked = (values) => ({ tickvals: values, ticktext: values.map((value) => value.toLocaleString("en")) });
const upright = (x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: css("--text"), width: 1.5, dash: "dot" } });
const shownRows = () => rows.map((row, i) => ({ ...row, i })).filter(visible);

// Error of every method against `x`.
function errors(x, text) {
  const shown = shownRows().filter((row) => row.error > 1e-4);
  const traces = methods.filter((method) => shown.some((row) => row.name === method)).map((method) => {
    const look = data.looks[method];
    const line = shown.filter((row) => row.name === method).sort((a, b) => a.slots - b.slots);
    return {
      type: "scatter", mode: "lines+markers", name: method, x: line.map(x), y: line.map((row) => row.error),
      line: { color: paint(method), width: look.width, dash: look.dash },
      marker: { symbol: look.symbol, size: look.width > 3 ? 11 : 8, color: paint(method), line: { color: paint(method), width: look.symbol.endsWith("open") ? 1.5 : 0 } },
      customdata: line.map((row) => row.i),
      hovertemplate: line.map((row) => `<b>${label(row)}</b><br>error ${row.error.toFixed(3)}, p90 ${row.p90.toFixed(3)}<br>`
        + `${row.slots.toFixed(1)} slots` + (row.cosine === null ? "" : `<br>cosine ${row.cosine.toFixed(4)}`) + "<extra></extra>"),
    };
  });
  return { traces, xaxis: axis(shown.map(x), text), yaxis: axis(shown.map((row) => row.error), "mean relative error") };
}
// Error against the time of one layer: where no whole models were timed.
function oneLayer() {
  const exact = rows.find((row) => row.kind === "exact");
  const made = errors((row) => row.ms, "ms for one layer's attention");
  return { ...made, xaxis: axis(shownRows().map((row) => row.ms).concat(exact ? [exact.ms] : []), "ms for one layer's attention"), shapes: exact ? [upright(exact.ms)] : [] };
}
// Time of a whole model against tokens: exact attention, and a line for each plan that was timed.
function wholeModels() {
  const timed = shownRows().filter((row) => Object.keys(row.whole).length);
  const traces = timed.map((row) => {
    const first = data.crossing?.row === row.i;
    const exact = row.kind === "exact";
    return {
      type: "scatter", mode: "lines+markers", name: label(row), x: data.lengths, y: data.lengths.map((length) => row.whole[length]),
      line: { color: paint(row.name), width: exact || first ? 3.4 : 1.4, dash: "solid" }, marker: { size: exact || first ? 9 : 6, symbol: exact ? "diamond" : "circle" },
      opacity: exact || first || !data.crossing ? 1 : 0.5, customdata: data.lengths.map(() => row.i),
      hovertemplate: data.lengths.map((length) => `<b>${label(row)}</b><br>${length.toLocaleString("en")} tokens: ${Math.round(row.whole[length]).toLocaleString("en")} ms<extra></extra>`),
    };
  });
  const last = data.lengths.at(-1);
  const named = timed.filter((row) => row.kind === "exact" || row.i === data.crossing?.row);
  const annotations = named.map((row) => ({
    x: Math.log10(last), y: Math.log10(row.whole[last]), xanchor: "right", yanchor: row.kind === "exact" ? "bottom" : "top", xshift: -8, yshift: row.kind === "exact" ? 4 : -76, align: "right",
    text: `<b>${label(row).replace(", ", ",<br>")}</b>`, showarrow: false, bgcolor: css("--back"), font: { color: paint(row.name) },
  }));
  const shapes = data.crossing ? [upright(data.crossing.length)] : [];
  if (data.crossing) annotations.push({ x: Math.log10(data.crossing.length), y: 1, yref: "paper", yanchor: "top", xanchor: "right", xshift: -5, showarrow: false, text: `equal times:<br>${data.crossing.length.toLocaleString("en")} tokens`, align: "right" });
  const times = timed.flatMap((row) => Object.values(row.whole));
  return { traces, shapes, annotations, xaxis: { ...axis(data.lengths, "tokens in one text"), ...marked(data.lengths) }, yaxis: axis(times, "ms for the whole model") };
}
const bySlots = () => {
  const made = errors((row) => row.slots, "slots per query");
  return { ...made, xaxis: { ...made.xaxis, ...marked(budgets) } };
};
const charts = [["time", data.lengths.length ? wholeModels : oneLayer], ["pareto", bySlots]];
$("first-says").textContent = data.lengths.length
  ? "Time of the whole model against the length of the text. Lower is better."
  : "Error against the time of one layer. The vertical line is the time of exact attention.";

function drawChart([id, make]) {
  const { traces, ...made } = make();
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--text"), family: "system-ui, sans-serif", size: 12 },
    margin: { l: 68, r: 12, t: 10, b: 46 }, showlegend: false, hovermode: "closest",
    hoverlabel: { bgcolor: css("--card"), font: { color: css("--text") } }, ...made,
  };
  const node = $(id);
  Plotly.react(node, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", `${made.xaxis.title.text} against ${made.yaxis.title.text}, ${traces.length} lines; every figure is in the table`);
  if (!node.dataset.listens) {
    node.dataset.listens = "yes";
    node.on("plotly_click", ({ points }) => change({ plans: [points[0].customdata, state.plans[1]] }));
  }
}
const drawCharts = () => charts.forEach(drawChart);
listeners.push((what) => { if (["filters", "dark"].some((name) => what.includes(name))) drawCharts(); });
drawCharts();
