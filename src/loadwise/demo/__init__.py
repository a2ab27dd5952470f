"""The demo: a stream of small problems with known answers, solved by agents through the real gateway.

Theory of operation. `tasks` generates problems whose answers are computed by code. `agent` lets one
OpenAI-SDK agent work on one problem, with a calculator tool where the problem is made for it. `grade` reads
the answer. `script` answers in place of an emulated model, right or wrong by the committed
`success_table.yaml`; the luck of a (task, model) pair depends on the seed, the task's id and the model only,
so every row of the comparison meets the same luck. `run` drives one row per policy through a gateway that the
caller starts, and `compare` turns the rows into the table and the gain over random mixing. Nothing here
starts a server or prints: the command does.
"""
