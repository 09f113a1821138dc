// Format numbers and times.

/** At most `digits` significant digits; a dash for a missing value. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return minus(value.toExponential(Math.max(0, digits - 2)));
  if (Number.isInteger(value)) return minus(String(value));
  return minus(String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))))));
}

/** A fixed number of decimals, for columns that should align. */
export function fixed(value, places = 4) {
  return value === null || value === undefined ? "–" : minus(value.toFixed(places));
}

function minus(text) {
  return text.replace(/^-/, "−");
}

/** "12 s", "3 min", "5 h", "2 d" since a time in seconds since 1970. */
export function age(seconds, now = Date.now() / 1000) {
  const passed = Math.max(0, now - seconds);
  if (passed < 90) return `${Math.round(passed)} s`;
  if (passed < 5400) return `${Math.round(passed / 60)} min`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h`;
  return `${Math.round(passed / 86400)} d`;
}

/** A share as a percentage. */
export function percent(share, places = 0) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(places)} %`;
}

/** "1 vote", "3 votes". */
export function count(many, thing) {
  return `${many} ${thing}${many === 1 ? "" : "s"}`;
}

/** A time of day in the browser's time zone. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

/** Control characters as visible symbols. */
export function visible(text) {
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)))
    .replace(
      /[\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
      (sign) => `⟨${sign.charCodeAt(0).toString(16).padStart(4, "0")}⟩`,
    );
}
