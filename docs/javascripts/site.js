/* Short code stays on one line; long names in tables may break after these characters. A table that does not fit becomes a
   list, with the head of the column before each cell. */
const tables = () => document.querySelectorAll(".md-typeset table:not([class])");

for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
  if (code.textContent.length < 20) code.style.whiteSpace = "nowrap";
  else if (code.closest("td") && !code.children.length) {
    code.innerHTML = code.innerHTML.replace(/(?<=\w)[_./=,:](?=[\w"])/g, "$&<wbr>");
  }
}
for (const table of tables()) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, place) => cell.setAttribute("data-head", heads[place] ?? ""));
  }
}

function fit() {
  for (const table of tables()) {
    table.removeAttribute("data-as-list");
    const isLong = [...table.querySelectorAll("tbody td")].some((cell) => cell.clientHeight > 9 * 24);
    const isWide = table.offsetWidth > table.parentElement.clientWidth + 1;
    if (isWide || isLong) table.setAttribute("data-as-list", "");
  }
}
fit();
addEventListener("resize", fit);

/* Names of the reference have pages of their own: links to their old places on one page lead there. */
if (location.hash.startsWith("#lockstep.")) {
  const name = location.hash.slice(1);
  const target = [...document.querySelectorAll("td:first-child a[href*='#lockstep.']")]
    .find((link) => name === link.hash.slice(1) || name.startsWith(`${link.hash.slice(1)}.`));
  if (target && !document.getElementById(name)) location.replace(`${target.href.split("#")[0]}#${name}`);
}
