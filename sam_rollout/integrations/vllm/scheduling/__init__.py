"""Schedules drafts: schedulers, late binding, engines in lockstep, rules for requests."""
