#!/usr/bin/env bash
# Shows that the caches of marimo return the result of another table if only the names of columns or rows differ.
#
# marimo 0.25.2, narwhals 2.29.0, pandas 3.1.1, polars 2.1.0, pyarrow 26.0.1. A notebook calls functions with @mo.cache
# for two tables each. It also uses @mo.persistent_cache, and mo.persistent_cache() as a block. Then it runs again, in a
# new process, for queues with other names and the same figures.
# Expected: a result is returned only for the same arguments, as the documentation says.
# Seen: marimo makes the key from the bytes of the array that numpy makes of a table. They contain no column names and
# no index, and marimo does not add them. So "the queue with most messages" is one that the table does not contain, and
# a corrected column name does not change the figures. The persistent caches return the wrong result after a restart,
# too. There is no error or log line. The documentation says that the values of array-like objects are hashed, but
# mentions neither tables nor names. Streamlit has repaired a similar fault (its issue 7086). Queues often have equal
# figures, for example the same limits or a few dead letters. A notebook for a message queue has to pass the names as
# another argument, for example list(table.columns).
# Output seen:
#   most messages of emails 5 and sms 7: sms; of web 5 and push 7: sms
#   failed, pandas: 90; after exchanging the two column names: 90; with another figure: 91
#   failed, polars: 90; after exchanging the two column names: 90; with another figure: 91
#   failed, pyarrow: 90; after exchanging the two column names: 90; with another figure: 91
#   persistent_cache, first process: most of emails 5 and sms 7: sms, in a block: sms
#   persistent_cache, second process: most of web 5 and push 7: sms, in a block: sms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet 'marimo==0.25.2' 'narwhals==2.29.0' 'pandas==3.1.1' 'polars==2.1.0' 'pyarrow==26.0.1'
cat >notebook.py <<'PYTHON'
import marimo

app = marimo.App()

@app.cell
def _():
    import json, os
    import marimo as mo
    import narwhals, pandas, polars, pyarrow
    return json, mo, narwhals, os, pandas, polars, pyarrow

@app.cell
def _(mo, narwhals):
    @mo.cache
    def most(counts):
        return counts.idxmax()

    @mo.cache
    def failed(table):
        return int(narwhals.from_native(table, eager_only=True)["failed"].sum())

    @mo.persistent_cache
    def persistent_most(counts):
        return counts.idxmax()
    return failed, most, persistent_most

@app.cell
def _(os, pandas):
    counts = pandas.Series([5, 7], index=os.environ["QUEUES"].split())
    return (counts,)

@app.cell
def _(counts, mo):
    with mo.persistent_cache("most"):
        block_most = counts.idxmax()
    return (block_most,)

@app.cell
def _(block_most, counts, failed, json, most, os, pandas, persistent_most, polars, pyarrow):
    tables = ({"failed": [50, 40], "sent": [4, 6]}, {"sent": [50, 40], "failed": [4, 6]},
              {"failed": [50, 41], "sent": [4, 6]})
    makers = {"pandas": pandas.DataFrame, "polars": polars.DataFrame, "pyarrow": pyarrow.table}
    seen = {
        "most": [most(pandas.Series([5, 7], index=queues)) for queues in (["emails", "sms"], ["web", "push"])],
        "failed": {library: [failed(make(table)) for table in tables] for library, make in makers.items()},
        "persistent": [persistent_most(counts), block_most],
    }
    with open(os.environ["SEEN"], "w") as file:
        json.dump(seen, file)
    return

if __name__ == "__main__":
    app.run()
PYTHON
QUEUES='emails sms' SEEN=first.json venv/bin/python notebook.py
QUEUES='web push' SEEN=second.json venv/bin/python notebook.py
cat >check.py <<'PYTHON'
import json, sys
from importlib.metadata import version

print(*(f"{name} {version(name)}" for name in ("marimo", "narwhals", "pandas", "polars", "pyarrow", "numpy")))
first, second = (json.load(open(name)) for name in ("first.json", "second.json"))
print("most messages of emails 5 and sms 7: {}; of web 5 and push 7: {}".format(*first["most"]))
for library, sums in first["failed"].items():
    print("failed, {}: {}; after exchanging the two column names: {}; with another figure: {}".format(library, *sums))
print("persistent_cache, first process: most of emails 5 and sms 7: {}, in a block: {}".format(*first["persistent"]))
print("persistent_cache, second process: most of web 5 and push 7: {}, in a block: {}".format(*second["persistent"]))
as_seen = {"most": ["sms", "sms"], "failed": dict.fromkeys(("pandas", "polars", "pyarrow"), [90, 90, 91]),
           "persistent": ["sms", "sms"]}
sys.exit(first != as_seen or second != as_seen)
PYTHON
venv/bin/python check.py
