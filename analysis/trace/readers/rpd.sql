-- Of rocmProfileData, by its rocpd_python (schema 2) and rpd_tracer/tableSchema.cmd (schema 3, in which arguments have a
-- table of their own).  The calls of an operation of the GPU are in rocpd_api_ops; its type tells what it is.

-- reads rocpd_op: id! start! end! gpuId queueId description_id opType_id!
-- reads rocpd_api: id! pid tid start! end! apiName_id! args_id
-- reads rocpd_api_ops: api_id! op_id!
-- reads rocpd_kernelapi: api_ptr_id kernelName_id
-- reads rocpd_copyapi: api_ptr_id kind
-- reads rocpd_string: id! string!
-- reads rocpd_ustring: id string

CREATE TEMP VIEW operations AS
SELECT O.start, COALESCE(O."end", -1) AS "end", T.string AS type, NULLIF(D.string, '') AS description,
    COALESCE(A.pid, -1) AS process, COALESCE(O.gpuId, -1) AS device, COALESCE(O.queueId, -1) AS stream,
    COALESCE(L.api_id, -1) AS correlation
FROM rocpd_op O
    LEFT JOIN (SELECT op_id, MIN(api_id) AS api_id FROM rocpd_api_ops GROUP BY op_id) L ON L.op_id = O.id
    LEFT JOIN rocpd_api A ON A.id = L.api_id
    LEFT JOIN rocpd_string D ON D.id = O.description_id
    LEFT JOIN rocpd_string T ON T.id = O.opType_id;

-- By the names of AMD's runtime; the kernels of a graph are Tasks.  A marker does no work.
CREATE TEMP VIEW kinds AS
SELECT *, CASE WHEN type LIKE '%Kernel%' OR type = 'Task' THEN 'kernel'
        WHEN type LIKE '%Copy%' OR type LIKE '%Memcpy%' THEN 'copy'
        WHEN type LIKE '%Fill%' OR type LIKE '%Memset%' THEN 'set'
        WHEN type LIKE '%Marker%' OR type LIKE '%Barrier%' THEN 'none' ELSE 'unknown' END AS kind_of_work
FROM operations;

CREATE TEMP VIEW kernels AS
SELECT start, "end", COALESCE(description, N.string, type) AS name, process, device, stream, correlation
FROM kinds
    LEFT JOIN rocpd_kernelapi K ON K.api_ptr_id = correlation LEFT JOIN rocpd_string N ON N.id = K.kernelName_id
WHERE kind_of_work = 'kernel';

CREATE TEMP VIEW copies AS
SELECT start, "end",
    CASE WHEN type LIKE '%HostToDevice%' OR kind = 1 THEN 'Memcpy HtoD'
        WHEN type LIKE '%DeviceToHost%' OR kind = 2 THEN 'Memcpy DtoH'
        WHEN type LIKE '%DeviceToDevice%' OR kind = 3 THEN 'Memcpy DtoD' ELSE 'Memcpy' END AS name,
    process, device, stream, correlation
FROM kinds LEFT JOIN rocpd_copyapi ON api_ptr_id = correlation WHERE kind_of_work = 'copy';

CREATE TEMP VIEW sets AS
SELECT start, "end", 'Memset (Device)' AS name, process, device, stream, correlation
FROM kinds WHERE kind_of_work = 'set';

CREATE TEMP VIEW calls AS
SELECT start, COALESCE("end", -1) AS "end", string AS name, COALESCE(pid, -1) AS process, COALESCE(tid, -1) AS tid,
    A.id AS correlation
FROM rocpd_api A LEFT JOIN rocpd_string N ON N.id = apiName_id WHERE string LIKE 'hip%' OR string LIKE 'cu%';

CREATE TEMP VIEW ranges AS
SELECT start, COALESCE("end", -1) AS "end", CAST(COALESCE(U.string, S.string) AS TEXT) AS name,
    COALESCE(pid, -1) AS process, COALESCE(tid, -1) AS tid
FROM rocpd_api
    LEFT JOIN rocpd_string N ON N.id = apiName_id LEFT JOIN rocpd_ustring U ON U.id = args_id
    LEFT JOIN rocpd_string S ON S.id = args_id
WHERE N.string = 'UserMarker';

-- Where files of several hosts are merged, their processes have numbers this far apart (pid_stride)
CREATE TEMP VIEW hosts AS SELECT COUNT(DISTINCT pid / 10000000) AS n FROM rocpd_api;

CREATE TEMP VIEW about AS SELECT NULL AS host, 0 AS base, NULL AS rank, NULL AS world_size, -1 AS process;

CREATE TEMP VIEW devices AS SELECT NULL AS name WHERE 0;

CREATE TEMP VIEW others AS
SELECT COALESCE(type, 'without a type') AS name, process FROM kinds WHERE kind_of_work = 'unknown';
