"""From values to a verdict: baselines, the rule, the proof that numbers are right."""
