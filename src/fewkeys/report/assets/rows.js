// The filters, and the table that can be sorted by every column.
const color = (name) => (data.looks[name].color === "#000000" ? "var(--text)" : data.looks[name].color);

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
    ...boxes.map((box, i) => make("label", {}, box, swatch ? make("i", { style: `background:${color(values[i])}` }) : "", text(values[i]))),
    make("button", { type: "button", onclick: () => all(true), "aria-label": `${legend}: all` }, "all"),
    make("button", { type: "button", onclick: () => all(false), "aria-label": `${legend}: none` }, "none"));
}
$("filters").append(
  filter("Methods", methods, state.methods, (name) => name, true),
  filter("Slots", budgets, state.budgets, String, false),
);

const columns = [
  ["plan", (row) => row.name, (row) => row.name + (row.star ? " *" : "")],
  ["asked", (row) => row.budget ?? Infinity, (row) => row.budget ?? "–"],
  ["slots", (row) => row.slots, (row) => row.slots.toFixed(1)],
  ["error", (row) => row.error, (row) => row.error.toFixed(3)],
  ["p50", (row) => row.p50, (row) => row.p50.toFixed(3)],
  ["p90", (row) => row.p90, (row) => row.p90.toFixed(3)],
  ["worst head", (row) => row.worst_error, (row) => `${row.worst_error.toFixed(2)} (${row.worst.join(".")})`],
  ["mass", (row) => row.mass, (row) => row.mass.toFixed(3)],
  ["recall", (row) => row.recall ?? -1, (row) => fixed(row.recall, 3)],
  ["cosine", (row) => row.cosine ?? -1, (row) => fixed(row.cosine, 4)],
  ["ms", (row) => row.ms, (row) => row.ms.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: row.ms < 1 ? 3 : 1 })],
  ["speed", (row) => row.exact_ms / row.ms, (row) => `${(row.exact_ms / row.ms).toFixed(2)}×`],
];
const order = { by: 1, down: false };
const heads = columns.map(([name], i) => make("th", { scope: "col" }, make("button", { type: "button", onclick: () => {
  order.down = order.by === i && !order.down;
  order.by = i;
  drawTable();
} }, name)));
$("table").tHead.append(make("tr", {}, make("th", { scope: "col" }, "A"), make("th", { scope: "col" }, "B"), ...heads));

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
    onchange: () => change({ plans: state.plans.map((plan, own) => (own === side ? i : plan)) }),
  }));
  $("table").tBodies[0].replaceChildren(...sorted.map(([row, i]) => make(
    "tr", { class: `${row.kind} ${row === best ? "best" : ""} ${state.plans.includes(i) ? "picked" : ""}`, title: row.plan },
    choose(0, i, row), choose(1, i, row), make("th", { scope: "row" }, columns[0][2](row)),
    ...columns.slice(1).map(([, , text]) => make("td", {}, String(text(row)))))));
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
