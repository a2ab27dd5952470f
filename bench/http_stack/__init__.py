"""The comparison behind docs/decisions/0002-http-stack.md: one proxy, four stacks."""
