"""Runs the migrations inside the transaction that ``autotune.store.schema`` hands over."""

from alembic import context

from autotune.store.models import VERSION_TABLE, Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite alters a table by building it anew
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
