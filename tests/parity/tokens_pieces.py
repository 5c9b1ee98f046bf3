def run(args, driver, folder): return False
