// What a chart says where it is pointed at. Without this script nothing is lost but that.
for (const chart of document.querySelectorAll("figure.chart")) {
  const area = chart.querySelector(".area"), line = area.querySelector("b"), said = area.querySelector("output");
  const axis = text => { const [low, high, kind, log] = text.split(" "); return [+low, +high, kind, +log]; };
  const [x0, x1, xKind] = axis(chart.dataset.x), [y0, y1, yKind, log] = axis(chart.dataset.y);
  const unit = (value, pairs) => {
    const [by, name] = pairs.find(([by]) => Math.abs(value) >= by) || pairs[pairs.length - 1];
    return (value / by).toPrecision(3).replace(/\.0+$/, "") + name;
  };
  const units = {
    bytes: [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"], [1, " B"]],
    seconds: [[86400, " d"], [3600, " h"], [60, " min"], [1, " s"], [1e-3, " ms"], [1e-6, " µs"]],
  };
  const text = (value, kind) => units[kind] ? unit(value, units[kind])
    : kind == "count" && Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en")
    : String(+value.toPrecision(4));
  const value = y => { const at = 1 - y / 1000;
    return log ? Math.pow(10, Math.log10(y0) + at * (Math.log10(y1) - Math.log10(y0))) : y0 + at * (y1 - y0); };
  let curves;
  const read = () => [...area.querySelectorAll("[data-n]")].map(path => [
    path.dataset.n, [...path.getAttribute("d").matchAll(/[ML](\d+) (\d+)/g)].map(([, x, y]) => [+x, +y])]);
  area.addEventListener("pointermove", event => {
    curves = curves || read();
    const box = area.getBoundingClientRect(), share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    const near = curves.map(([name, points]) => [name, points.reduce((best, point) =>
      Math.abs(point[0] - share * 2000) < Math.abs(best[0] - share * 2000) ? point : best, points[0])]);
    const values = near.map(([name, point]) => [name, value(point[1])]);
    if ("s" in chart.dataset) values.forEach((one, at) => { one[1] -= (values[at + 1] || [0, 0])[1]; });
    const lines = values.map(([name, one]) => (values.length > 1 ? name + ": " : "") + text(one, yKind));
    said.textContent = [chart.dataset.t + " " + text(x0 + share * (x1 - x0), xKind), ...lines].join("\n");
    line.style.left = share * 100 + "%";
    said.style.left = share < .5 ? share * 100 + 2 + "%" : "auto";
    said.style.right = share < .5 ? "auto" : (1 - share) * 100 + 2 + "%";
    area.classList.add("on");
  });
  area.addEventListener("pointerleave", () => area.classList.remove("on"));
}
