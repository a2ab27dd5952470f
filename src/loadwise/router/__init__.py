"""Subsystem 1: a program is routed once, admitted when it fits, served turn by turn, judged late and learned from."""
