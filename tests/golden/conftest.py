def pytest_addoption(parser):
    parser.addoption("--regenerate", action="store_true", help="rewrite tests/golden/*.csv from the binary")
