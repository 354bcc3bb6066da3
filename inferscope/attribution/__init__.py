"""Attribution: from one step's total to every request, phase and cause; pure functions."""
