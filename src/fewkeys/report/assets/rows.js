// The filters, and the table that can be sorted by every column.
const color = (name) => (data.looks[name].color === "#000000" ? "var(--text)" : data.looks[name].color);
const lines = { solid: "solid", dash: "dashed", dot: "dotted" };

function filter(legend, values, set, text, swatch) {
  const boxes = values.map((value) => {
    const box = make("input", { type: "checkbox", checked: true, onchange: () => {
      box.checked ? set.add(value) : set.delete(value);
      change({ filters: true });
    } });
    return box;
  });
  const all = (on) => {
    boxes.forEach((box, i) => { box.checked = on; on ? set.add(values[i]) : set.delete(values[i]); });
    change({ filters: true });
  };
  return make("fieldset", {}, make("legend", {}, legend),
    ...boxes.map((box, i) => make("label", {}, box, swatch ? make("i", { style: `border-top:3px ${lines[data.looks[values[i]].dash]} ${color(values[i])}` }) : "", text(values[i]))),
    make("button", { type: "button", onclick: () => all(true), "aria-label": `${legend}: all` }, "all"),
    make("button", { type: "button", onclick: () => all(false), "aria-label": `${legend}: none` }, "none"));
}
$("filters").append(
  filter("Methods", methods, state.methods, (name) => name, true),
  filter("Slots", budgets, state.budgets, String, false),
);

const plainMs = (ms) => ms.toLocaleString("en", { minimumFractionDigits: ms < 10 ? 1 : 0, maximumFractionDigits: ms < 1 ? 3 : ms < 10 ? 1 : 0 });
const times = data.lengths.length
  ? data.lengths.map((length) => [`ms at ${length.toLocaleString("en")}`, (row) => row.whole[length] ?? Infinity, (row) => (row.whole[length] ? plainMs(row.whole[length]) : "–")])
  : [["speed", (row) => row.exact_ms / row.ms, (row) => `${(row.exact_ms / row.ms).toFixed(2)}×`]];
// Name, error and times come first, because a narrow screen shows these columns; it hides the columns of class "more".
// Rows with times of whole models come first.
const columns = [
  ["plan", (row) => (Object.keys(row.whole).length ? row.budget ?? 0 : 1e9 + (row.budget ?? 1e9)), (row) => row.name + (row.budget === null ? "" : ` ${row.budget}`) + (row.star ? " *" : "")],
  ["error", (row) => row.error, (row) => row.error.toFixed(3)],
  ["ms", (row) => row.ms, (row) => plainMs(row.ms)],
  ...times,
  ["slots", (row) => row.slots, (row) => row.slots.toFixed(1)],
  ["p50", (row) => row.p50, (row) => row.p50.toFixed(3)],
  ["p90", (row) => row.p90, (row) => row.p90.toFixed(3)],
  ["worst head", (row) => row.worst_error, (row) => `${row.worst_error.toFixed(2)} L${row.worst[0]} H${row.worst[1]}`],
  ["mass", (row) => row.mass, (row) => row.mass.toFixed(3)],
  ["recall", (row) => row.recall ?? -1, (row) => fixed(row.recall, 3)],
  ["cosine", (row) => row.cosine ?? -1, (row) => fixed(row.cosine, 4)],
];
const more = (i) => (i > 3 && i < 2 + times.length ? "more" : false);
const order = { by: 0, down: false };
const heads = columns.map(([name], i) => make("th", { scope: "col", class: more(i) }, make("button", { type: "button", onclick: () => {
  order.down = order.by === i && !order.down;
  order.by = i;
  drawTable();
} }, name)));
$("table").tHead.append(make("tr", {}, ...heads, ...["A", "B"].map((side) => make("th", { scope: "col" }, `plan ${side}`))));

function drawTable() {
  heads.forEach((head, i) => {
    head.setAttribute("aria-sort", i !== order.by ? "none" : order.down ? "descending" : "ascending");
    head.firstChild.textContent = columns[i][0] + (i !== order.by ? "" : order.down ? " ↓" : " ↑");
  });
  const value = columns[order.by][1];
  const sorted = rows.map((row, i) => [row, i]).filter(([row]) => visible(row)).sort(([a, i], [b, j]) => {
    const [x, y] = [value(a), value(b)];
    return (x < y ? -1 : x > y ? 1 : 0) * (order.down ? -1 : 1) || i - j;
  });
  const choose = (side, i, row) => make("td", {}, make("input", {
    type: "radio", name: `plan-${side}`, checked: state.plans[side] === i, "aria-label": `${label(row)} as plan ${"AB"[side]}`,
    onchange: () => change({ plans: state.plans.map((plan, j) => (j === side ? i : plan)) }),
  }));
  $("table").tBodies[0].replaceChildren(...sorted.map(([row, i]) => make(
    "tr", { class: `${row.kind} ${row.star ? "best" : ""} ${state.plans.includes(i) ? "picked" : ""}`, title: row.plan },
    make("th", { scope: "row" }, columns[0][2](row)),
    ...columns.slice(1).map(([, , text], c) => make("td", { class: more(c + 1) }, String(text(row)))),
    choose(0, i, row), choose(1, i, row))));
  $("shown").textContent = `${sorted.length} of ${rows.length} rows are shown.`;
}
listeners.push((what) => {
  if (what.includes("plans")) {
    const focused = document.activeElement?.getAttribute?.("aria-label");
    drawTable();
    if (focused) [...$("table").querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused)?.focus();
  } else if (what.includes("filters")) drawTable();
});
drawTable();
