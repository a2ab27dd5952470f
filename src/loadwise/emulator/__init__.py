"""An engine of `sim` behind HTTP in real or scaled time: what gateways, agents and tests talk to without a model."""
