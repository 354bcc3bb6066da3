"""Attribution of a step's total to requests, phases and causes, as pure functions."""
