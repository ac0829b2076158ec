"""The first tables: device, layer, trial, record."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TIMES = "time_us > 0 AND time_us < 1e30 AND spread_us >= 0 AND spread_us < 1e30 AND samples > 0 AND launches > 0"
_EXTENTS = (
    *("n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "pad_top", "pad_bottom", "pad_left", "pad_right"),
    *("dilation_h", "dilation_w", "groups"),
)


def upgrade() -> None:
    op.create_table(
        "device",
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("key", "name", "kind", "arch")),
        sa.Column("sm_count", sa.Integer, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device"),
        sa.UniqueConstraint("key", name="uq_device"),
    )
    op.create_table(
        "layer",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("problem", sa.String, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _EXTENTS),
        *(sa.Column(name, sa.String, nullable=False) for name in ("dtype", "layout", "epilogue", "out_dtype")),
        sa.PrimaryKeyConstraint("id", name="pk_layer"),
        sa.UniqueConstraint("problem", name="uq_layer"),
    )
    op.create_table(
        "trial",
        *_run(),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        *_measurement(nullable=True),
        sa.Column("compile_s", sa.Double, nullable=False),
        sa.Column("registers", sa.Integer),
        sa.Column("spill_bytes", sa.Integer),
        *_keys("trial"),
        sa.UniqueConstraint("layer_id", "device_id", "config", name="uq_trial"),
        sa.CheckConstraint(
            "status IN ('correct', 'compile', 'constraints', 'runtime', 'correctness', 'timeout')",
            name=op.f("ck_trial_status"),
        ),
        sa.CheckConstraint(
            "(status = 'correct') = (time_us IS NOT NULL AND spread_us IS NOT NULL AND samples IS NOT NULL"
            " AND launches IS NOT NULL AND condition IS NOT NULL)",
            name=op.f("ck_trial_measured"),
        ),
        sa.CheckConstraint(f"time_us IS NULL OR ({_TIMES})", name=op.f("ck_trial_times")),
    )
    op.create_table(
        "record",
        *_run(),
        *_measurement(nullable=False),
        sa.Column("verified", sa.Boolean, nullable=False),
        *_keys("record"),
        sa.UniqueConstraint("layer_id", "device_id", name="uq_record"),
        sa.CheckConstraint(_TIMES, name=op.f("ck_record_times")),
    )


def _run() -> list[sa.Column]:
    return [
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("id", "layer_id", "device_id")),
        *(sa.Column(name, sa.String, nullable=False) for name in ("family", "config")),
        sa.Column("knobs", sa.JSON, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in ("kernel_digest", "compiler", "driver")),
        sa.Column("harness", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Integer) for name in ("clock_mhz", "temperature_c")),
        sa.Column("created_at", sa.String, nullable=False),
    ]


def _measurement(nullable: bool) -> list[sa.Column]:
    return [
        *(sa.Column(name, sa.Double, nullable=nullable) for name in ("time_us", "spread_us")),
        *(sa.Column(name, sa.Integer, nullable=nullable) for name in ("samples", "launches")),
        sa.Column("condition", sa.String, nullable=nullable),
    ]


def _keys(table: str) -> list[sa.Constraint]:
    return [
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
        sa.ForeignKeyConstraint(["layer_id"], ["layer.id"], name=f"fk_{table}_layer"),
        sa.ForeignKeyConstraint(["device_id"], ["device.id"], name=f"fk_{table}_device"),
    ]
