"""What is learned and how: methods, nets, metrics and the numbers behind them.

What both programs share is here too: configs, errors, files, log lines, and the server of pages.
Nothing here knows gRPC, the messages on the wire, or one of the programs.
"""
