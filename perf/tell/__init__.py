"""What people and other tools are told: lines, reports, histories, exports."""
