// The pages of `mtrain ui`: refresh what changes, sort and filter the list, show logs. Texts of runs are only ever
// inserted as text, or as fragments that the server has escaped.
"use strict";

const silence = document.getElementById("silence");

async function fetched(address) {
  try {
    const answer = await fetch(address);
    silence.hidden = true;
    return answer.ok ? await answer.text() : null;
  } catch {
    silence.hidden = false;
    return null;
  }
}

function repeat(every, act) {
  const turn = async () => {
    if (!document.hidden) await act();
    setTimeout(turn, every);
  };
  setTimeout(turn, every);
}

// ---------------------------------------------------------------------------------------------- parts that refresh
for (const part of document.querySelectorAll("[data-poll]")) {
  let shown = null;
  repeat(Number(part.dataset.every), async () => {
    const text = await fetched(part.dataset.poll);
    if (text === null || text === shown) return;
    shown = text;
    const chosen = new Set([...part.querySelectorAll("input:checked")].map((box) => box.value));
    const open = [...part.querySelectorAll("details")].map((each) => each.open);
    part.innerHTML = text;
    for (const box of part.querySelectorAll("input[type=checkbox]")) box.checked = chosen.has(box.value);
    part.querySelectorAll("details").forEach((each, place) => { each.open = open[place] ?? each.open; });
    arrange();
  });
}

// ------------------------------------------------------------------------------------------------ the list of runs
const table = document.getElementById("runs");
let order = null;

function arrange() {
  if (!table) return;
  const words = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = document.getElementById("state").value;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word)) || (state !== "" && row.dataset.state !== state);
  }
  if (order) {
    const key = (row) => row.cells[order.column].dataset.value;
    const compared = order.kind === "number"
      ? (a, b) => (parseFloat(key(a)) || 0) - (parseFloat(key(b)) || 0)
      : (a, b) => key(a).localeCompare(key(b), undefined, { numeric: true });
    rows.sort((a, b) => order.sign * compared(a, b));
    body.append(...rows);
  }
  const count = table.querySelectorAll("input:checked").length;
  document.getElementById("compare").disabled = count < 2 || count > 8;
}

if (table) {
  document.getElementById("filter").addEventListener("input", arrange);
  document.getElementById("state").addEventListener("change", arrange);
  table.addEventListener("change", arrange);
  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("th[data-sort]");
    if (!head) return;
    const again = order && order.column === head.cellIndex;
    const sign = again ? -order.sign : head.dataset.sort === "number" ? -1 : 1;
    order = { column: head.cellIndex, kind: head.dataset.sort, sign };
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    arrange();
  });
  arrange();
}

// --------------------------------------------------------------------------------------------------------- the logs
const logs = document.getElementById("logs");
if (logs) {
  const lines = document.getElementById("lines");
  const show = async () => {
    const text = await fetched(`${logs.dataset.source}?file=${encodeURIComponent(logs.value)}`);
    if (text === null || text === lines.textContent) return;
    const following = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    lines.textContent = text;
    if (following) lines.scrollTop = lines.scrollHeight;
  };
  logs.addEventListener("change", show);
  show();
  if (lines.dataset.every) repeat(Number(lines.dataset.every), show);
}
