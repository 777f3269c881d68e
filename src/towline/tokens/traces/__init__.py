"""From a finished graph to training rows and the trajectory."""
