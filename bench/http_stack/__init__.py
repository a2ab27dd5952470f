"""The comparison behind docs/decisions/0002-http-stack.md: the same relay on four HTTP stacks."""
