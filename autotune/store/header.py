"""Records as one C++17 header that needs nothing but the standard library: a constexpr table and its look-up."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.store import rows
from autotune.trial import Record

_TEXTS = ("dtype", "layout", "epilogue", "out_dtype")
_MEMBERS = {column: column.upper() if len(column) == 1 else column for column in rows.LAYER_COLUMNS}
_NUMBERS = [member for column, member in _MEMBERS.items() if column not in _TEXTS]
_PARTS = """\
// Tuned convolution layers, written by: autotune export --format header
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace autotune {

// A layer. All texts are those of its canonical text: dtype "f16", layout "nhwc", epilogue "identity", out_dtype "f16".
struct Layer {
  std::int64_t %(numbers)s;
  std::string_view %(texts)s;
};

struct Knob {
  std::string_view name;
  std::int64_t value;
};

// A layer's best known config on a device model. device: its name, " x" and the number of its multiprocessors.
struct Record {
  std::string_view device;
  Layer layer;
  std::string_view family, config;
  const Knob* knobs;
  std::size_t knob_count;
  double time_us;
  bool verified;

  constexpr std::int64_t knob(std::string_view name, std::int64_t otherwise) const {
    for (std::size_t i = 0; i < knob_count; ++i)
      if (knobs[i].name == name) return knobs[i].value;
    return otherwise;
  }
};

inline constexpr std::array<Knob, %(knob_count)d> knobs{{
%(knobs)s}};

// in the order of `compare`
inline constexpr std::array<Record, %(record_count)d> records{{
%(records)s}};

// Negative, zero or positive, as a record's key is before, equal to or after the one asked for.
constexpr int compare(const Record& record, std::string_view device, const Layer& layer) {
  if (record.device != device) return record.device < device ? -1 : 1;
%(comparisons)s
  return 0;
}

// The record of a layer on a device model, or nullptr.
constexpr const Record* find(std::string_view device, const Layer& layer) {
  std::size_t first = 0, last = records.size();
  while (first < last) {
    const std::size_t middle = first + (last - first) / 2;
    const int order = compare(records.data()[middle], device, layer);
    if (order == 0) return records.data() + middle;
    if (order < 0) first = middle + 1;
    else last = middle;
  }
  return nullptr;
}

}  // namespace autotune
"""


def text(records: Iterable[Record]) -> str:
    """The header, with the records in the order in which its look-up searches them."""
    # texts in UTF-8 are ordered as they are in Python
    ordered = sorted(records, key=lambda record: (record.device.key, *rows.layer_values(record.problem).values()))
    knobs: list[str] = []
    lines: list[str] = []
    for record in ordered:
        lines.append(_line(record, len(knobs)))
        knobs += [f"  {{{_quoted(name)}, {value}}},\n" for name, value in record.config.knobs]
    return _PARTS % {
        "numbers": ", ".join(_NUMBERS),
        "texts": ", ".join(_TEXTS),
        "knob_count": len(knobs),
        "knobs": "".join(knobs),
        "record_count": len(lines),
        "records": "".join(lines),
        "comparisons": "\n".join(
            f"  if (record.layer.{name} != layer.{name}) return record.layer.{name} < layer.{name} ? -1 : 1;"
            for name in _MEMBERS.values()
        ),
    }


def _line(record: Record, first_knob: int) -> str:
    layer = ", ".join(
        str(value) if isinstance(value, int) else _quoted(value) for value in rows.layer_values(record.problem).values()
    )
    texts = ", ".join(map(_quoted, (record.family, record.config.name)))
    knobs = f"knobs.data() + {first_knob}, {len(record.config.knobs)}"
    verified = str(record.verified).lower()
    return f"  {{{_quoted(record.device.key)}, {{{layer}}}, {texts}, {knobs}, {record.time_us!r}, {verified}}},\n"


def _quoted(value: str) -> str:
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in value.encode())
    return f'"{"".join(plain)}"'
