"""The tables of the store, and nothing else."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, Double, ForeignKey, MetaData, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = "0001"  # the newest revision in db/migrations
VERSION_TABLE = "autotune_schema"  # Alembic's table; its presence tells our databases from others


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )


class DeviceRow(Base):
    """A device model. key: ``DeviceSpec.key``; spec: the whole ``DeviceSpec``, as last stated."""

    __tablename__ = "device"
    __table_args__ = (UniqueConstraint("key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str]
    name: Mapped[str]
    kind: Mapped[str]
    arch: Mapped[str]
    sm_count: Mapped[int]
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)


class LayerRow(Base):
    """A layer. problem: its canonical text, epilogue included, the key; the other columns repeat it for analysis."""

    __tablename__ = "layer"
    __table_args__ = (UniqueConstraint("problem"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    problem: Mapped[str]
    n: Mapped[int] = mapped_column(BigInteger)
    c: Mapped[int] = mapped_column(BigInteger)
    h: Mapped[int] = mapped_column(BigInteger)
    w: Mapped[int] = mapped_column(BigInteger)
    k: Mapped[int] = mapped_column(BigInteger)
    r: Mapped[int] = mapped_column(BigInteger)
    s: Mapped[int] = mapped_column(BigInteger)
    stride_h: Mapped[int] = mapped_column(BigInteger)
    stride_w: Mapped[int] = mapped_column(BigInteger)
    pad_top: Mapped[int] = mapped_column(BigInteger)
    pad_bottom: Mapped[int] = mapped_column(BigInteger)
    pad_left: Mapped[int] = mapped_column(BigInteger)
    pad_right: Mapped[int] = mapped_column(BigInteger)
    dilation_h: Mapped[int] = mapped_column(BigInteger)
    dilation_w: Mapped[int] = mapped_column(BigInteger)
    groups: Mapped[int] = mapped_column(BigInteger)
    dtype: Mapped[str]
    layout: Mapped[str]
    epilogue: Mapped[str]
    out_dtype: Mapped[str]


class _Run:
    """The columns that trials and records share: what was run, where, and the provenance."""

    id: Mapped[int] = mapped_column(primary_key=True)
    layer_id: Mapped[int] = mapped_column(ForeignKey("layer.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    family: Mapped[str]
    config: Mapped[str]
    # JSON, not JSONB: the order of the knobs is kept
    knobs: Mapped[dict[str, int]] = mapped_column(JSON)
    kernel_digest: Mapped[str]
    compiler: Mapped[str]
    driver: Mapped[str]
    harness: Mapped[int]
    clock_mhz: Mapped[int | None]
    temperature_c: Mapped[int | None]
    created_at: Mapped[str]


# the upper bounds refuse infinity, and on PostgreSQL NaN, which is greater than every number there
_TIMES = "time_us > 0 AND time_us < 1e30 AND spread_us >= 0 AND spread_us < 1e30 AND samples > 0 AND launches > 0"


class TrialRow(_Run, Base):
    """A config tried on a layer and a device; measured exactly when its status is correct."""

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint("layer_id", "device_id", "config"),
        CheckConstraint(
            "status IN ('correct', 'compile', 'constraints', 'runtime', 'correctness', 'timeout')", name="status"
        ),
        CheckConstraint(
            "(status = 'correct') = (time_us IS NOT NULL AND spread_us IS NOT NULL AND samples IS NOT NULL"
            " AND launches IS NOT NULL AND condition IS NOT NULL)",
            name="measured",
        ),
        CheckConstraint(f"time_us IS NULL OR ({_TIMES})", name="times"),
    )

    status: Mapped[str]
    detail: Mapped[str]
    time_us: Mapped[float | None] = mapped_column(Double)
    spread_us: Mapped[float | None] = mapped_column(Double)
    samples: Mapped[int | None]
    launches: Mapped[int | None]
    condition: Mapped[str | None]
    compile_s: Mapped[float] = mapped_column(Double)
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]


class RecordRow(_Run, Base):
    """The best known config of a layer on a device, with its own copy of measurement and provenance."""

    __tablename__ = "record"
    __table_args__ = (UniqueConstraint("layer_id", "device_id"), CheckConstraint(_TIMES, name="times"))

    time_us: Mapped[float] = mapped_column(Double)
    spread_us: Mapped[float] = mapped_column(Double)
    samples: Mapped[int]
    launches: Mapped[int]
    condition: Mapped[str]
    verified: Mapped[bool]
